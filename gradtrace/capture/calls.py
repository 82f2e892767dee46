"""Module calls: a stack of open calls for each thread, and the forward boundaries of each call.

Both engines end here: the interception of ``nn.Module.__call__`` (engine ``graph``) and torch's own hooks
(engine ``hooks``) report that a call begins, returns or raises. What is to happen in backward is the business
of the object they are given as ``gradients``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradtrace.capture.boundaries import Found, tensors_in_arguments, tensors_in_result
from gradtrace.capture.interception import Call
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.roots import find_root
from gradtrace.capture.session import Session, cannot_observe, quiet
from gradtrace.capture.statistics import _INTEGER_TYPES


class Frame:
    """One open module call."""

    __slots__ = (
        "call",
        "entry",
        "input_edges",
        "inputs",
        "is_outermost",
        "micro_step",
        "phase",
        "start",
        "watched",
    )

    def __init__(self, entry: ModuleEntry, phase: str, call: int, micro_step: int) -> None:
        self.entry = entry
        self.phase = phase
        self.call = call
        self.micro_step = micro_step
        self.is_outermost = False
        self.start = 0
        self.inputs: Found = []
        self.input_edges: dict[Any, str] = {}
        self.watched: Any = None


class Gradients(Protocol):
    """What is done about the backward boundaries of a call."""

    def call_begins(self, frame: Frame, outermost: Frame) -> None: ...

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None: ...

    def outermost_ended(self) -> None: ...


class Calls:
    """Watches the calls of all modules of the traced roots.

    ``on_outermost`` is called before an outermost call is recorded: a step may end, a root's first state is
    taken. ``admit`` makes a root of an outermost module that nobody knows, or is None when only the models
    that were given are traced.
    """

    def __init__(
        self,
        session: Session,
        gradients: Gradients,
        on_outermost: Callable[[ModuleEntry, bool], None],
        *,
        discover: bool,
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._on_outermost = on_outermost
        self._discover = discover
        self._thread = threading.local()
        self._counts: Counter[tuple[ModuleEntry, str]] = Counter()
        self._counted = (-1, -1)
        self._ignored: set[int] = set()

    # The interception ---------------------------------------------------------------------------------------

    def around(self, call: Call) -> Call:
        """Return the function that stands in for ``nn.Module.__call__``."""
        session = self._session
        begin = session.guarded(self.begin)
        finish = session.guarded(self.finish)
        abandon = session.guarded(self.abandon)

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            frame = begin(module, args, kwargs)
            if frame is None:
                return call(module, *args, **kwargs)
            try:
                result = call(module, *args, **kwargs)
            except BaseException:
                abandon(frame)
                raise
            finish(frame, result)
            return result

        return __call__

    # What both engines report -------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        """Open a call; return None for one that is not watched."""
        if cannot_observe():
            return None
        stack = self._stack()
        entry = self._session.names.entry(module)
        if entry is None:
            entry = self._admit(module, stack)
            if entry is None:
                return None
        if entry.transparent:
            return None
        if not stack:
            self._on_outermost(entry, not torch.is_grad_enabled() and not _inside_backward())
        frame = self._open(entry, stack)
        if self._session.capturing:
            with quiet():
                self._record_inputs(frame, args, kwargs)
            self._gradients.call_begins(frame, stack[0])
        return frame

    def finish(self, frame: Frame, result: Any) -> None:
        """Close a call that has returned ``result``."""
        stack = self._stack()
        outermost = stack[0] if stack else frame
        self._unwind(stack, frame)
        if self._session.capturing:
            outputs = tensors_in_result(result)
            if frame.entry.selected:
                with quiet():
                    self._record_tensors(frame, "output", frame.phase, outputs)
            self._gradients.call_returns(frame, outermost, outputs)
        if not stack:
            self._gradients.outermost_ended()

    def abandon(self, frame: Frame) -> None:
        """Close a call that has raised."""
        stack = self._stack()
        self._unwind(stack, frame)
        if not stack:
            self._gradients.outermost_ended()

    # Parts --------------------------------------------------------------------------------------------------

    def _stack(self) -> list[Frame]:
        stack: list[Frame] | None = getattr(self._thread, "stack", None)
        if stack is None:
            stack = self._thread.stack = []
        return stack

    @staticmethod
    def _unwind(stack: list[Frame], frame: Frame) -> None:
        # A frame above this one is left over from a call that torch abandoned without an exception here.
        while stack and stack.pop() is not frame:
            pass

    def _admit(self, module: nn.Module, stack: list[Frame]) -> ModuleEntry | None:
        """Name a module that is called for the first time: a new root, or one added below a known root."""
        names = self._session.names
        for frame in reversed(stack):
            names.refresh(frame.entry.root)
            if (entry := names.entry(module)) is not None:
                return entry
        if stack or not self._discover or id(module) in self._ignored:
            return None
        root_module, label = find_root(module)
        if root_module is not module and names.entry(root_module) is not None:
            root = names.entry(root_module).root  # type: ignore[union-attr]
            names.refresh(root)
        elif type(module).__name__ in ("DataParallel", "DistributedDataParallel") or root_module is not module:
            names.add_root(root_module, label)
        else:
            names.add_root(module, label)
        return names.entry(module)

    def _open(self, entry: ModuleEntry, stack: list[Frame]) -> Frame:
        clock = self._session.clock
        if _inside_backward():
            phase = "recompute"
        elif stack:
            phase = stack[0].phase
        else:
            phase = "forward" if torch.is_grad_enabled() else "evaluation"
        now = (clock.step, clock.micro_step)
        if self._counted != now:
            self._counts.clear()
            self._counted = now
        key = (entry, phase)
        frame = Frame(entry, phase, self._counts[key], clock.micro_step)
        self._counts[key] += 1
        entry.calls += 1
        stack.append(frame)
        frame.is_outermost = len(stack) == 1
        return frame

    def _record_inputs(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame.inputs = tensors_in_arguments(args, kwargs)
        if not frame.entry.selected:
            return
        if frame.is_outermost and frame.phase == "forward":
            for pair in frame.inputs:
                computed = pair[1].requires_grad and pair[1].grad_fn is not None
                self._record_tensors(frame, "input", "forward" if computed else "input", [pair])
        else:
            self._record_tensors(frame, "input", frame.phase, frame.inputs)

    def _record_tensors(self, frame: Frame, tensor: str, phase: str, found: Found) -> None:
        for path, value in found:
            if not _is_recorded(value, with_integers=frame.is_outermost and tensor == "input"):
                continue
            self._session.record(phase, frame.entry, tensor, path, value, call=frame.call, micro_step=frame.micro_step)


def _is_recorded(value: Tensor, *, with_integers: bool) -> bool:
    dtype = value.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return with_integers and dtype in _INTEGER_TYPES


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
