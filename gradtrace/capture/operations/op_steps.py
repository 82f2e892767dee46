"""Op-level capture of chosen steps: every operation forward and every autograd node backward, with module and line.

Unlike the dispatch modes of a replay this one is active in the user's own training: it looks, and changes
nothing. It lies below all modes of the user's and is taken away without disturbing theirs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from gradtrace.capture.frame import Frame
from gradtrace.capture.graph import sequence_number
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.operations.callers import Callers
from gradtrace.capture.operations.dispatch import put_below, redispatch, take_out
from gradtrace.capture.operations.nodes import Gradients, walk
from gradtrace.capture.operations.operators import has_own_node
from gradtrace.capture.operations.schemas import Traits, tensors_of, traits_of
from gradtrace.capture.session import CANNOT_MEASURE, Session, cannot_observe, quiet
from gradtrace.capture.statistics import Measure

_UPDATE = "optimizer"
_PASSED_OVER = frozenset(("aten.detach", "aten.alias"))
"""Torch makes these to save a tensor for the backward pass: they would show each such tensor twice."""


class OpName:
    """The name of a forward operation: that of its autograd node, which it has only when it is over."""

    __slots__ = ("_name", "_result")

    def __init__(self, name: str, result: Tensor) -> None:
        self._name = name
        self._result = weakref.ref(result) if has_own_node(result) else None

    def settle(self) -> None:
        """Ask the result for its node, before another operation can change it."""
        result = None if self._result is None else self._result()
        node = None if result is None else result.grad_fn
        if node is not None:
            self._name = node.name()
        self._result = None

    def __str__(self) -> str:
        return self._name


class Place(NamedTuple):
    """Where an operation ran."""

    micro_step: int
    owner: ModuleEntry | None
    call: int | None
    file: str | None
    line: int | None


class OpRow(NamedTuple):
    """A row of op-level capture; ``op`` is to be turned into text when the row is written, not before."""

    micro_step: int
    phase: str
    owner: ModuleEntry | None
    call: int | None
    tensor: str
    path: str
    measure: Measure
    op: OpName | str
    file: str | None
    line: int | None


class _Begun(NamedTuple):
    """What is known before an operation runs."""

    traits: Traits
    phase: str
    place: Place
    written: list[Tensor]


class OpSteps:
    """Records the operations of the steps from ``first`` up to, not including, ``end``.

    ``innermost`` gives this thread's innermost open module call. ``write`` takes the rows. ``paused`` is to be
    true while gradtrace itself runs a part of the training again.
    """

    def __init__(
        self,
        session: Session,
        first: int,
        end: int,
        innermost: Callable[[], Frame | None],
        write: Callable[[OpRow], None],
    ) -> None:
        self.paused = False
        self._session = session
        self._steps = range(first, end)
        self._innermost = innermost
        self._write = write
        self._mode: _Mode | None = None
        self._thread = 0
        self._known = 0
        self._places: dict[int, Place] = {}
        self._last: list[OpName] = []
        self._outside = "input"
        self._passes: list[list[RemovableHandle]] = []
        self._begin = session.guarded(self._op_begins)
        self._end = session.guarded(self._op_ended)
        self._node_ended = session.guarded(self._node_ran)

    # The life of a step ---------------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """Start to watch, in this thread, if the step is one of those that were asked for."""
        if step not in self._steps:
            self.step_ends()
            return
        self._outside = "input"
        self._places.clear()
        self._thread = threading.get_ident()
        self._known = sequence_number()
        if self._mode is None:
            self._mode = _Mode(self)
            put_below(self._mode)

    def step_ends(self) -> None:
        """Stop to watch; nothing happens if nothing is watched."""
        mode, self._mode = self._mode, None
        self._settle_last()
        self._places.clear()
        for handles in self._passes:
            _remove(handles)
        if mode is not None:
            mode.steps = None  # in another thread it stays, and lets everything pass
            take_out(mode)

    def backward_begins(self, outputs: Iterable[Any]) -> None:
        """Watch the nodes of the pass that is about to start; passes inside of a pass too."""
        handles: list[RemovableHandle] = []
        self._passes.append(handles)
        if self._mode is None or self.paused:
            return
        self._settle_last()
        micro_step = self._session.clock.micro_step
        for node in walk(tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor)):
            place = self._places.get(node._sequence_nr()) or Place(micro_step, None, None, None, None)
            if place.owner is None or place.owner.selected:
                handles.append(node.register_hook(functools.partial(self._node_ended, node.name(), place)))

    def backward_ended(self, *, accumulating: bool) -> None:
        """Let go of the nodes of the pass that has begun last; ``accumulating`` is true for ``backward()``."""
        if self._passes:
            _remove(self._passes.pop())
        if accumulating:
            self._outside = _UPDATE

    # What the mode and the hooks call -------------------------------------------------------------------------

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record its results."""
        begun = self._begin(func, args, kwargs)
        result = redispatch(func, args, kwargs)
        if begun is not None:
            self._end(begun, result)
        return result

    def _op_begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
        if self.paused or cannot_observe():
            return None
        callers = Callers(_DISPATCH)
        if callers.are_gradtrace or callers.start_backward:
            return None
        self._settle_last()
        traits, call = traits_of(func), self._innermost()
        place = self._place(callers.user, call)
        self._learn_nodes(place)
        phase = None if traits.name in _PASSED_OVER else self._phase(call, callers)
        if phase is None or (call is not None and not call.entry.selected):
            return None
        return _Begun(traits, phase, place, [tensor for _, tensor in traits.written(args, kwargs)])

    def _op_ended(self, begun: _Begun, result: Any) -> None:
        results = tensors_of(result)
        results += [tensor for tensor in begun.written if not any(tensor is other for other in results)]
        for index, tensor in enumerate(results):
            # What is written in place gets its new version only after this.
            measure = self._measured(tensor, once=not begun.written)
            if measure is not None:
                name = OpName(begun.traits.name, tensor)
                self._last.append(name)
                self._write_row(begun.phase, begun.place, "output", index, measure, name)

    def _node_ran(self, name: str, place: Place, results: Gradients, _: Gradients) -> None:
        if self._mode is None or self.paused:
            return
        for index, gradient in enumerate(results):
            measure = None if gradient is None else self._measured(gradient, once=True)
            if measure is not None:
                self._write_row("backward", place, "grad_input", index, measure, name)

    # Parts ----------------------------------------------------------------------------------------------------

    def _write_row(self, phase: str, place: Place, tensor: str, index: int, measure: Measure, op: OpName | str) -> None:
        micro_step, owner, call, file, line = place
        self._write(OpRow(micro_step, phase, owner, call, tensor, str(index), measure, op, file, line))

    def _measured(self, tensor: Tensor, *, once: bool) -> Measure | None:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        statistics = self._session.statistics
        try:
            with quiet():
                return statistics.measure_once(tensor) if once else statistics.measure(tensor)
        except CANNOT_MEASURE as error:
            self._session.cannot_measure(error)
            return None

    def _settle_last(self) -> None:
        last, self._last = self._last, []
        for name in last:
            name.settle()

    def _place(self, frame: FrameType | None, call: Frame | None) -> Place:
        file, line = (None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        if call is None:
            return Place(self._session.clock.micro_step, None, None, file, line)
        return Place(call.micro_step, call.entry, call.call, file, line)

    def _learn_nodes(self, place: Place) -> None:
        """Note where the nodes were made that this thread has made since the last operation.

        The node of an operation is made just before it runs, that of a custom Function before its forward, so
        that the line is the first one in there.
        """
        if threading.get_ident() != self._thread:
            return
        known, self._known = self._known, sequence_number()
        for number in range(known, self._known):
            self._places[number] = place

    def _phase(self, call: Frame | None, callers: Callers) -> str | None:
        """Return the phase of an operation, None where it belongs to a node of a backward pass."""
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if callers.recompute else None
        if call is not None:
            self._outside = "evaluation" if call.phase == "evaluation" else "loss"
            return call.phase
        if not torch.is_grad_enabled() and (self._outside == _UPDATE or callers.include_optimizer):
            return _UPDATE
        return "input" if self._outside == _UPDATE else self._outside


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows operations to ``steps`` while that is set."""

    supports_higher_order_operators = True

    def __init__(self, steps: OpSteps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: OpSteps | None = steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.steps is None:
            return redispatch(func, args, kwargs or {})
        return self.steps.around(func, args, kwargs or {})


_DISPATCH: CodeType = _Mode.__torch_dispatch__.__code__


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
