"""Module calls: a stack of open calls for each thread, and the forward boundaries of each call.

Both engines end here: the interception of ``nn.Module.__call__`` (engine ``graph``) and torch's own hooks
(engine ``hooks``) report that a call begins, returns or raises. What is to happen in backward is the business
of the object they are given as ``gradients``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradtrace.capture.boundaries import Found, is_computed, tensors_in_arguments, tensors_in_result
from gradtrace.capture.compiled import taken_for
from gradtrace.capture.frame import Frame, Gradients, output_site
from gradtrace.capture.graph import sequence_number
from gradtrace.capture.interception import Call
from gradtrace.capture.names import ModuleEntry, is_wrapper, unwrapped
from gradtrace.capture.readable import is_floating, is_number
from gradtrace.capture.replay.kept import Keeper, Kept
from gradtrace.capture.roots import find_root
from gradtrace.capture.session import Session, be_quiet, cannot_observe, quiet
from gradtrace.capture.subclasses import met, without_their_own_ways
from gradtrace.capture.watch.outputs import OutputWatch
from gradtrace.trace.sent import let_pass

_grad_mode = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id


class _Thread(threading.local):
    """The open calls of one thread."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.paused = False


class Calls:
    """Watches the calls of all modules of the traced roots.

    ``on_outermost`` is called before an outermost call is recorded: a step may end, a root's first state is
    taken. With ``discover`` an outermost module that nobody knows becomes a root; without, only the models
    that were given are traced.
    """

    def __init__(
        self,
        session: Session,
        gradients: Gradients,
        on_outermost: Callable[[ModuleEntry, bool, Callable[[], bool]], None],
        *,
        discover: bool,
        keeper: Keeper | None = None,
        look_at_state: Callable[[ModuleEntry, str], None] = lambda entry, phase: None,
        look_at_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._keeper = keeper
        self._look_at_state = look_at_state
        self._outputs = OutputWatch(session, look_at_weights)
        self._gradients = gradients
        self._on_outermost = on_outermost
        self._discover = discover
        self._thread = _Thread()
        self._counts: dict[str, dict[ModuleEntry, int]] = defaultdict(dict)
        self._counted = (-1, -1)
        self._searched: tuple[int, int] | None = None
        self.compiled: dict[ModuleEntry, None] = {}
        """The modules that torch.compile has compiled, as far as they were called."""

    # The interception ---------------------------------------------------------------------------------------

    def around(self, call: Call) -> Call:
        """Return the function that stands in for ``nn.Module.__call__``."""
        session = self._session
        begin, finish = session.shield(self.begin), session.shield(self.finish)
        abandon = session.guarded(self.abandon)

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not session.active:
                return call(module, *args, **kwargs)
            frame = None
            # As ``guarded`` does it, without the cost of one more call for each.
            grad_mode = _grad_mode()
            try:
                frame = begin(module, args, kwargs)
            except BaseException as error:
                session.caught(error, grad_mode)
            if frame is None:
                return call(module, *args, **kwargs)
            try:
                result = call(module, *args, **kwargs)
                grad_mode = _grad_mode()  # a signal's handler may raise here, too
            except BaseException:
                abandon(frame)
                raise
            if session.active:
                try:
                    finish(frame, result)
                except BaseException as error:
                    abandon(frame)
                    session.caught(error, grad_mode)
            return result

        return __call__

    # What both engines report -------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        """Open a call; return None for one that is not watched."""
        stack = self._thread.stack
        if not self._session.capturing and (stack or _inside_backward()):
            return None
        if self._thread.paused:
            return None
        if not (stack or met.any):
            _look_for_subclasses(args, kwargs)
        if met.any and torch._C._is_torch_function_enabled():
            with without_their_own_ways():
                return self.begin(module, args, kwargs)
        if cannot_observe():
            if self._discover or self._session.names.entry(module) is not None:
                self._session.count_unseen()
            return None
        called = module
        entry = self._session.names.entry(module)
        if entry is None or entry.transparent:
            module = taken_for(module)
            # What it calls may be no module but a replica of one, whose parameters are the module's all the same.
            if entry is None and self._discover and not stack and isinstance(module, nn.DataParallel):
                self._new_root(unwrapped(module))
            entry = self._session.names.entry(module) or self.admit(module)
            if entry is None or entry.transparent:
                return None
        if stack and stack[-1].inner is module:
            stack[-1].inner = None
            return None
        if not stack:
            self._announce(entry, args, kwargs)
        frame = self._open(entry, stack)
        frame.inner = module if called is not module else None
        if called is not module or module._compiled_call_impl is not None:
            self.compiled.setdefault(entry)
        try:
            if frame.is_outermost and frame.phase == "forward" and self._keeper is not None:
                self._keep(self._keeper, frame, module, args, kwargs)
            if self._session.capturing:
                self._see_inputs(frame, args, kwargs)
            else:
                frame.start = sequence_number()
        except BaseException:
            self._unwind(stack, frame)
            raise
        return frame

    def finish(self, frame: Frame, result: Any) -> None:
        """Close a call that has returned ``result``."""
        if met.any and torch._C._is_torch_function_enabled():
            with without_their_own_ways():
                return self.finish(frame, result)
        stack = self._thread.stack
        outermost = stack[0] if stack else frame
        if stack and stack[-1] is frame:
            stack.pop()
        else:
            self._unwind(stack, frame)
        if frame.captured and self._session.capturing:
            outputs = self._flat(tensors_in_result, result)
            loud = be_quiet()
            try:
                if frame.entry.selected:
                    self._see_outputs(frame, outputs)
                if frame.kept is not None:
                    self._kept_returned(frame, frame.kept, outputs)
                self._gradients.call_returns(frame, outermost, outputs)
            finally:
                if loud is not None:
                    loud()
        elif frame.is_outermost and not self._session.capturing:
            self._watch_outputs(frame, self._flat(tensors_in_result, result))
        if not stack:
            self._gradients.outermost_ended()

    def abandon(self, frame: Frame) -> None:
        """Close a call that has raised."""
        stack = self._thread.stack
        self._unwind(stack, frame)
        if frame.kept is not None and self._keeper is not None:
            self._keeper.forget(frame.kept)
        if not stack:
            self._gradients.outermost_ended()

    def admit(self, module: nn.Module) -> ModuleEntry | None:
        """Name a module that is called for the first time: one added below a known root, or a new root."""
        if is_wrapper(module):
            return None
        session = self._session
        # A module that is made anew for each call is never found: once in a micro step is enough to see that.
        now = session.clock.moment
        if self._searched != now:
            for root in session.names.roots:
                session.names.refresh(root)
            entry = session.names.entry(module)
            if entry is not None:
                return entry
            self._searched = now
        if module.__dict__.get("_is_replica", False):
            session.unmeasured["call of a replica of DataParallel"] += 1
        elif self._thread.stack:
            session.unmeasured["call of a module that is registered nowhere in its model"] += 1
        elif self._discover:
            return self._new_root(module)
        return None

    def innermost(self, entry: ModuleEntry) -> Frame | None:
        """Return this thread's innermost open call of a module."""
        return next((frame for frame in reversed(self._thread.stack) if frame.entry is entry), None)

    def drop_all_of(self, entries: Container[ModuleEntry]) -> None:
        """Let go of this thread's open calls of modules of which nobody will say that they have returned."""
        stack = self._thread.stack
        stack[:] = [frame for frame in stack if frame.entry not in entries]

    def drop(self) -> None:
        """Let go of this thread's open calls and their graph: recording has ended in the middle of them."""
        self._thread.stack.clear()
        self._gradients.outermost_ended()

    # For a replay -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See no call of this thread for a while."""
        self._thread.paused = True
        try:
            yield
        finally:
            self._thread.paused = False

    def place_now(self) -> tuple[ModuleEntry, int] | None:
        """Return this thread's innermost open call, as its module and number."""
        frame = self.innermost_open()
        return None if frame is None else (frame.entry, frame.call)

    def innermost_open(self) -> Frame | None:
        """Return this thread's innermost open call."""
        stack = self._thread.stack
        return stack[-1] if stack else None

    def count_on(self, numbers: Mapping[ModuleEntry, int]) -> None:
        """Let the next forward call of each of these modules have the number given."""
        self._counted = self._session.clock.moment
        self._counts["forward"].update(numbers)

    def _keep(
        self, keeper: Keeper, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        frame.kept = keeper.call_begins(frame.entry, module, args, kwargs, self._session.names.count)
        if frame.kept is not None:
            frame.kept.rows_from = self._session.rows.position

    def _kept_returned(self, frame: Frame, kept: Kept, outputs: Found) -> None:
        if self._keeper is not None:
            has_graph = any(value.requires_grad for _, value in outputs)
            frame.alive = self._keeper.returned(kept, self._session.rows.position, has_graph=has_graph)

    # Parts --------------------------------------------------------------------------------------------------

    @staticmethod
    def _unwind(stack: list[Frame], frame: Frame) -> None:
        # A frame above this one is left over from a call that torch abandoned without an exception here.
        if frame in stack:
            del stack[stack.index(frame) :]

    def _announce(self, entry: ModuleEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A call inside of backward recomputes one that has been announced.
        if not _inside_backward():
            self._on_outermost(entry, not torch.is_grad_enabled(), lambda: _goes_on(args, kwargs))

    def _new_root(self, module: nn.Module) -> ModuleEntry | None:
        names = self._session.names
        if not names.revive(module, type(module).__name__):
            top, label = find_root(module)
            known = names.entry(top)
            if known is not None:
                names.refresh(known.root)
            elif not names.revive(top, label):
                names.add_root(top, label)
        self._searched = None
        return names.entry(module)

    def _open(self, entry: ModuleEntry, stack: list[Frame]) -> Frame:
        clock = self._session.clock
        if _inside_backward():
            phase = "recompute"
        elif stack:
            phase = stack[0].phase
        else:
            phase = "forward" if torch.is_grad_enabled() else "evaluation"
        now = clock.moment
        if self._counted != now:
            self._counts.clear()
            self._counted = now
        counts = self._counts[phase]
        number = counts.get(entry, 0)
        counts[entry] = number + 1
        frame = Frame(entry, phase, number, clock.micro_step, not stack)
        entry.calls += 1
        stack.append(frame)
        return frame

    def _see_inputs(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = self._flat(tensors_in_arguments, args, kwargs)
        grad_mode = _grad_mode()
        loud = be_quiet()
        try:
            if frame.entry.selected:
                if frame.is_outermost:
                    self._see_outside_inputs(frame, inputs)
                else:
                    see, sites, call, micro_step = self._session.see, frame.sites.input, frame.call, frame.micro_step
                    for path, value in inputs:
                        dtype = value.dtype
                        if dtype.is_floating_point or dtype.is_complex:
                            see(sites[path], value, call, micro_step)
            self._gradients.call_begins(frame, inputs, grad_mode=grad_mode)
        finally:
            if loud is not None:
                loud()
        frame.captured = True

    def _see_outside_inputs(self, frame: Frame, inputs: Found) -> None:
        """Record what the script hands over: labels and token ids too, and apart from them what it has computed."""
        is_recorded = is_number if frame.phase != "recompute" else is_floating
        for path, value in inputs:
            if is_recorded(value.dtype):
                is_batch = frame.phase == "forward" and not is_computed(value)
                sites = frame.entry.sites["input"] if is_batch else frame.sites
                self._session.see(sites.input[path], value, frame.call, frame.micro_step)

    def _see_outputs(self, frame: Frame, outputs: Found) -> None:
        session = self._session
        start = session.rows.position
        all_finite = True
        for path, value in outputs:
            if is_floating(value.dtype):
                measure = session.see(output_site(frame, path, value), value, frame.call, frame.micro_step)
                all_finite = all_finite and (measure is None or measure.counts is None)
        if not all_finite:
            # What the script has written into the module's state since the last look comes before what it made.
            end = session.rows.position
            self._look_at_state(frame.entry, frame.phase)
            session.rows.bring_forward(start, end)

    def _watch_outputs(self, frame: Frame, outputs: Found) -> None:
        """Look at what an outermost call returns in a step that is only watched, and keep what a replay needs."""
        with quiet():
            sited = [
                (path, output_site(frame, path, value), value) for path, value in outputs if is_floating(value.dtype)
            ]
            totals = self._outputs.look(sited, frame.call, frame.micro_step)
            if frame.kept is not None:
                frame.kept.totals = totals
                self._kept_returned(frame, frame.kept, outputs)
            self._gradients.watched_call_returns(frame, outputs)

    def _flat(self, flatten: Callable[..., Found], *nested: Any) -> Found:
        """Flatten arguments or a result; containers may be of the user's own making, and raise."""
        try:
            return flatten(*nested)
        except Exception as error:
            let_pass(error)
            self._session.unmeasured[f"{type(error).__name__} while looking into arguments or results"] += 1
            return []


def _look_for_subclasses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take notice of tensor classes of the script's own before anything is asked of their tensors."""
    try:
        tensors_in_arguments(args, kwargs)
    except Exception as error:  # counted when they are to be recorded
        let_pass(error)


def _inside_backward() -> bool:
    return _graph_task() != -1


def _goes_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call goes on with a graph: it is a criterion, or a second part of one pass."""
    return any(tensor.grad_fn is not None for _, tensor in tensors_in_arguments(args, kwargs))
