"""Runs the root calls of a failing pass again, operation by operation, and leaves no trace of it.

The weights are still those of the pass: the optimizer has not run. Forward runs on copies of the buffers, backward
through ``torch.autograd.grad`` with the gradients that arrived at the outputs, so no ``.grad`` changes and no
reducer fires; then once more under anomaly detection. What is seen inside is the business of ``operations/``,
when to replay that of ``alarm.py``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from gradtrace.capture import interception
from gradtrace.capture.backward import GraphGradients
from gradtrace.capture.backward_watch import BackwardWatch
from gradtrace.capture.boundaries import Found, tensors_in_arguments, tensors_in_result
from gradtrace.capture.calls import Calls
from gradtrace.capture.clock import Clock
from gradtrace.capture.coverage import not_counted
from gradtrace.capture.frame import Frame
from gradtrace.capture.graph import sequence_number
from gradtrace.capture.held import TensorEntry
from gradtrace.capture.interception import Call, Observer
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.operations.births import Birth
from gradtrace.capture.operations.guards import Guard, Memory, Refused
from gradtrace.capture.operations.nodes import AnomalySays, BackwardNodes, anomaly_says
from gradtrace.capture.operations.operators import ForwardOps
from gradtrace.capture.replay.comparison import (
    any_difference,
    backward_of,
    first_difference,
    forward_of,
    same_number,
)
from gradtrace.capture.replay.kept import Keeper, Kept, callers, lines_of
from gradtrace.capture.replay.undo import swapped_buffers, undone
from gradtrace.capture.rows import Row, RowBuffer
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.sharding import sharding
from gradtrace.trace.confirmation import Confirmation, SourceLine
from gradtrace.trace.sent import let_pass


@dataclass
class Outcome:
    """What a replay found, and how it went."""

    confirmation: Confirmation
    births: list[Birth] = field(default_factory=list)
    ran: bool = True
    """Whether anything was run again."""
    seen: list[Rerun] = field(default_factory=list)
    """What the calls have left the second time, where all came out the same."""


@dataclass
class Rerun:
    """The rows of one call that was run again."""

    kept: Kept
    forward: list[Row]
    backward: list[Row] = field(default_factory=list)


class Replayer:
    """Replays passes of one recording. ``calls`` and ``backward`` are those that watch the training itself.

    With ``kept_compiled`` what was compiled ran compiled. Here torch runs it eagerly, as it does wherever each
    operation is looked at (by a dispatch mode), and more of it is seen.
    """

    def __init__(self, session: Session, calls: Calls, backward: BackwardWatch, *, kept_compiled: bool = False) -> None:
        self._kept_compiled = kept_compiled
        self._session = session
        self._calls = calls
        self._backward = backward

    def replay(self, keeper: Keeper) -> Outcome:
        """Replay the root calls of a pass, in order.

        What goes wrong here never leaves: it is the reason of a replay that was none.
        """
        # One that no pass has come by may be older than the last update: it is no part of this.
        kept = [call for call in keeper.calls if call.was_reached or call.changed is None]
        reason = keeper.obstacle or keeper.refused or _obstacle(kept, keeper.dropped)
        if reason is not None:
            return Outcome(Confirmation("not_replayed", reason), ran=False)
        ran_compiled = self._kept_compiled and bool(self._calls.compiled)
        stage = _Stage(self._session, ran_compiled=ran_compiled)
        uncounted = not_counted(self._session.names.all_modules() if ran_compiled else ())
        modules = {id(module): module for call in kept for module, _ in call.training}
        try:
            with self._calls.paused(), self._backward.paused(), undone(modules.values()), uncounted:
                for call in kept:
                    stage.run(call)
        except Refused as refusal:
            return Outcome(Confirmation("not_replayed", str(refusal)))
        except (torch.OutOfMemoryError, MemoryError):
            return Outcome(Confirmation("not_replayed", "out of memory"))
        except Exception as error:
            let_pass(error)
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            return Outcome(Confirmation("not_replayed", f"running it again failed: {words}"), stage.births)
        else:
            said = stage.confirmation()
            return Outcome(said, stage.births, seen=stage.seen if said.status == "reproduced" else [])
        finally:
            vars(stage).clear()  # it is in a cycle with what watches it, which is to hold neither model nor batch


def _obstacle(kept: Sequence[Kept], dropped: int) -> str | None:
    """Return why the calls cannot be replayed, None when nothing is known to be in the way."""
    if not kept:
        return "no call of the model in grad mode is behind it"
    if dropped:
        return f"the pass has {dropped + len(kept)} root calls; at most {len(kept)} are kept"
    for call in kept:
        reason = call.trouble or call.changed
        if reason is not None:
            return reason
        by = sharding(module for module, _ in call.training)
        if by is not None:
            return f"the model's parameters are sharded ({by})"
        if any(isinstance(m, torch.jit.ScriptModule) for m, _ in call.training):
            return "a part of the model is scripted (torch.jit): it cannot run on copies of its buffers"
    return None


class _Stage:
    """One replay: a recording of its own beside the training's; sees the calls before the graph does."""

    def __init__(self, session: Session, *, ran_compiled: bool) -> None:
        self._ran_compiled = ran_compiled
        self._recorded = session.rows
        clock = Clock(session.clock.step)
        clock.micro_step = session.clock.micro_step
        self._session = Session(session.names, Schedule(1, None, None), clock, RowBuffer(0), session.statistics.anew())
        self._graph = GraphGradients(self._session)
        self._calls = Calls(self._session, self, lambda entry, evaluating, goes_on: None, discover=False)
        self._nodes = BackwardNodes(self._call_of)
        self._ops: ForwardOps | None = None
        self._ranges: list[tuple[int, int, ModuleEntry, int]] = []
        self._forward: list[Birth] = []
        self.seen: list[Rerun] = []
        self._difference: str | None = None
        self._anomaly: AnomalySays | None = None
        self._backward_from: int | None = None
        self._is_cut_off = False

    @property
    def births(self) -> list[Birth]:
        """What was born, forward first."""
        return [*self._forward, *self._nodes.births]

    def confirmation(self) -> Confirmation:
        """Say how the replay went, once all calls have run."""
        said = self._anomaly
        what_it_said = (None, None, None) if said is None else (said.function, said.output, said.message)
        difference = self._difference or self._difference_in_backward()
        if self._session.failure is not None:
            return Confirmation("not_reproduced", f"watching it failed: {self._session.failure}", *what_it_said)
        if difference is None:
            return Confirmation("reproduced", None, *what_it_said)
        cause = "hidden state, an own random generator, or changed data"
        if self._ran_compiled:
            cause = f"the step ran compiled, which rounds otherwise than the eager replay; or {cause}"
        reason = f"it came out otherwise at {difference}: {cause}"
        return Confirmation("not_reproduced", reason, *what_it_said)

    def run(self, kept: Kept) -> None:
        """Replay one call, forward and, where gradients had arrived, backward."""
        kept.rng.restore()
        for module, training in kept.training:
            module.training = training
        rows = kept.rows
        recorded = _of(kept, self._recorded.between(kept.rows_from, kept.rows_to) if rows is None else rows)
        self._count_like(recorded)
        start = self._session.rows.position
        copies = {key: copy.clone() for key, copy in kept.buffers.items()}
        memory = Memory(copies.values())
        with swapped_buffers(kept.held, copies):
            outputs = self._run_forward(kept, memory)
            self._resolve()
            seen = _of(kept, self._session.rows.between(start))
            self.seen.append(Rerun(kept, seen))
            self._difference = self._difference or self._difference_in_forward(kept, recorded, seen, outputs)
            start = self._session.rows.position
            self._run_backward(kept, memory, outputs)
            self.seen[-1].backward = self._session.rows.between(start)
        if memory.refusal is not None:  # also where the model's own code has swallowed it
            raise memory.refusal

    # Forward ------------------------------------------------------------------------------------------------

    def _run_forward(self, kept: Kept, memory: Memory) -> Found:
        ops = self._ops = ForwardOps(memory, self._calls.place_now, _call_module.__code__)
        observer = _OfThisThread(self._calls)
        interception.add(observer)
        try:
            with _as_it_was(kept), ops:
                result = _call_module(kept.module, kept.args, kept.kwargs)
        finally:
            interception.remove(observer)
            self._ops = None
            _below(kept.lines, ops.births)
            self._forward += ops.births
        return tensors_in_result(result)

    def _difference_in_forward(
        self, kept: Kept, recorded: Sequence[Row], seen: Sequence[Row], outputs: Found
    ) -> str | None:
        if kept.totals is None and self._ran_compiled:
            return any_difference(forward_of(recorded), forward_of(seen), all_of_it=False)
        if kept.totals is None:
            return first_difference(forward_of(recorded), forward_of(seen))
        for path, value in outputs:
            total = kept.totals.get(path)
            if total is not None and not same_number(total, self._session.statistics.total(value)):
                return f"output {path} of {kept.entry.name or 'the root'}"
        return None

    def _count_like(self, recorded: Sequence[Row]) -> None:
        """Give the calls the numbers that they had."""
        numbers: dict[Any, int] = {}
        for row in recorded:
            if row.call is not None and row.phase in ("input", "forward"):
                numbers.setdefault(row.owner, row.call)
        self._calls.count_on(numbers)

    # What the calls report; see ``Gradients`` ---------------------------------------------------------------

    def call_begins(self, frame: Frame, inputs: Found, *, grad_mode: bool) -> None:
        """Pass on."""
        self._graph.call_begins(frame, inputs, grad_mode=grad_mode)

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """Note which operations were the call's, and which of their values it hands out."""
        self._ranges.append((frame.start, sequence_number(), frame.entry, frame.call))
        if self._ops is not None:
            self._ops.leaves(frame.entry, frame.call, outputs)
        self._graph.call_returns(frame, outermost, outputs)

    def watched_call_returns(self, frame: Frame, outputs: Found) -> None:
        """Pass on: a replay captures everything, so this is never called."""
        self._graph.watched_call_returns(frame, outputs)

    def outermost_ended(self) -> None:
        """Pass on."""
        self._graph.outermost_ended()

    def _call_of(self, number: int) -> tuple[ModuleEntry, int] | None:
        """Return the innermost call in which the node with a sequence number was made: inner calls end first."""
        return next(((entry, call) for start, end, entry, call in self._ranges if start <= number < end), None)

    # Backward -----------------------------------------------------------------------------------------------

    def _run_backward(self, kept: Kept, memory: Memory, outputs: Found) -> None:
        pairs = [(value, kept.gradients[path]) for path, value in outputs if path in kept.gradients]
        if not pairs:
            return
        heads, gradients = [value for value, _ in pairs], [gradient for _, gradient in pairs]
        if self._backward_from is None or kept.backward_from < self._backward_from:
            self._backward_from = kept.backward_from
        self._is_cut_off = self._is_cut_off or kept.cut_off
        inputs = _differentiable(kept)
        known = len(self._nodes.births)
        with Guard(memory, _call_module.__code__), torch.enable_grad():
            with self._nodes, self._gradients_recorded(kept, inputs):
                self._nodes.watch(heads)
                torch.autograd.grad(heads, inputs, gradients, retain_graph=True, allow_unused=True)
            self._graph.backward_ended()
            self._resolve()
            above = len(lines_of(callers()))  # the stack of a node begins with the frames that led to this replay
            _below(kept.lines, self._nodes.births[known:], above)
            self._session.capturing = False
            if self._anomaly is None and all(bool(g.isfinite().all()) for g in gradients):
                self._anomaly = _under_anomaly_detection(heads, inputs, gradients)
            self._session.capturing = True

    @contextlib.contextmanager
    def _gradients_recorded(self, kept: Kept, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Record the parameters' gradients where the step itself did not: where it was only watched."""
        handles = []
        record = self._session.guarded(self._record_gradient)
        for tensor in inputs if kept.totals is not None else ():
            entry = self._session.names.parameter(tensor)
            if entry is not None and entry.owner.selected:
                handles.append(tensor.register_hook(functools.partial(record, entry)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record_gradient(self, entry: TensorEntry, gradient: Tensor) -> None:
        with quiet():
            self._session.record("backward", entry.owner, "grad", entry.name, gradient)

    def _difference_in_backward(self) -> str | None:
        if any(run.kept.totals is not None for run in self.seen):
            return None  # nothing was recorded of the way from the loss to the gradients
        replayed = backward_of(self._session.rows.between(0))
        owners = {row.owner.root for row in replayed}
        recorded = backward_of(self._recorded.between(self._backward_from or 0))
        expected = [row for row in recorded if row.owner.root in owners]
        return any_difference(expected, replayed, all_of_it=not (self._is_cut_off or self._ran_compiled))

    def _resolve(self) -> None:
        with quiet():
            self._session.statistics.resolve()


class _OfThisThread:
    """Lets an observer see the calls of one thread; others may go on training in the meantime."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._thread = threading.get_ident()

    def around(self, call: Call) -> Call:
        """Return the function that stands in for ``nn.Module.__call__``."""
        observed = self._observer.around(call)

        def __call__(*args: Any, **kwargs: Any) -> Any:
            return (observed if threading.get_ident() == self._thread else call)(*args, **kwargs)

        return __call__


def _of(kept: Kept, rows: Sequence[Row]) -> list[Row]:
    """Return those rows that a call has left; another thread's may lie in between."""
    return [row for row in rows if getattr(row.owner, "root", None) is kept.root]


def _call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


def _under_anomaly_detection(heads: list[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> AnomalySays | None:
    torch._C.set_anomaly_enabled(True, True)
    try:
        torch.autograd.grad(heads, inputs, gradients, allow_unused=True)
    except RuntimeError as error:
        says = anomaly_says(error)
        if says is None:
            raise
        return says
    finally:
        torch._C.set_anomaly_enabled(False, False)
    return None


@contextlib.contextmanager
def _as_it_was(kept: Kept) -> Iterator[None]:
    """Set autocast as it was, note a stack at every node, and call reentrantly checkpointed functions plainly.

    That kind of checkpointing refuses ``autograd.grad``.
    """
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in kept.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        stack.enter_context(torch.enable_grad())
        torch._C.set_anomaly_enabled(True, False)
        stack.callback(torch._C.set_anomaly_enabled, False, False)
        setattr(CheckpointFunction, "apply", staticmethod(_plain_call))  # noqa: B010 (some versions type it as a method)
        stack.callback(delattr, CheckpointFunction, "apply")
        yield


def _plain_call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def _differentiable(kept: Kept) -> list[Tensor]:
    """Return what gradients are asked for: the parameters and the arguments that take them."""
    found = [value for _, value in tensors_in_arguments(kept.args, kept.kwargs)]
    found += [p for module, _ in kept.training for p in module._parameters.values() if p is not None]
    return list({id(value): value for value in found if value.requires_grad}.values())


def _below(lines: tuple[SourceLine, ...], births: list[Birth], without: int = 0) -> None:
    """Put the lines that led to the original call above those inside of the replayed one."""
    for birth in births:
        birth.traceback = (*lines, *birth.traceback[without:])
