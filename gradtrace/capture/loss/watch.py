"""Follows a step from the model's outputs to ``backward()`` and has the code in between looked at.

Stands between ``Calls`` and the graph: outermost calls end the loss code, and their outputs begin it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradtrace.capture.boundaries import Found
from gradtrace.capture.frame import Frame, Gradients
from gradtrace.capture.graph import Edge, edge_of, sequence_number
from gradtrace.capture.loss.code import LossCode
from gradtrace.capture.loss.forward import LossFinding
from gradtrace.capture.loss.lines import LossLines
from gradtrace.capture.loss.region import Interval
from gradtrace.capture.loss.values import Known
from gradtrace.capture.replay.kept import Callers, callers, lines_of
from gradtrace.capture.session import Session
from gradtrace.trace.confirmation import SourceLine

_MOST_CALLS = 1_000
"""So many outermost calls of a step are told apart, and so many outputs; a step may have any number."""


class _Thread(threading.local):
    """The outermost calls of one thread's step: where their nodes are, and what they returned."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self.inside: list[Interval] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.finite: dict[tuple[int, int], bool] = {}

    def add(self, interval: Interval, heads: list[Tensor]) -> None:
        """Take the numbers of a call's nodes, if it has any, and its outputs."""
        half = _MOST_CALLS // 2
        if interval[0] < interval[1]:
            self.inside.append(interval)
        if len(self.inside) > _MOST_CALLS:  # the older ones become one: what lies between them is no loss code any more
            self.inside[:half] = [(self.inside[0][0], self.inside[half - 1][1])]
            self.finite = {edge: finite for edge, finite in self.finite.items() if edge[0] >= self.inside[1][0]}
        self.outputs += map(weakref.ref, heads)
        if len(self.outputs) > _MOST_CALLS:
            self.outputs = [reference for reference in self.outputs if reference() is not None][-half:]


class LossWatch:
    """Watches the loss code of one recording. ``lines`` is None where no source lines are wanted."""

    def __init__(self, session: Session, gradients: Gradients, lines: LossLines | None) -> None:
        self._session = session
        self._gradients = gradients
        self._lines = lines
        self._code = LossCode(session)
        self._thread = _Thread()
        self._finding: LossFinding | None = None
        self._pass_began: Callers = ()

    # What the calls report; see ``Gradients`` ---------------------------------------------------------------

    def call_begins(self, frame: Frame, inputs: Found, *, grad_mode: bool) -> None:
        """An outermost call interrupts the loss code."""
        if frame.is_outermost and self._lines is not None:
            self._lines.call_begins()
        self._gradients.call_begins(frame, inputs, grad_mode=grad_mode)

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """What an outermost call returns with a graph, the loss is made of."""
        self._gradients.call_returns(frame, outermost, outputs)
        if frame.is_outermost:
            heads = [value for _, value in outputs if value.requires_grad]
            self._note(frame, heads)
            if self._lines is not None:
                self._lines.call_ended(has_graph=bool(heads))

    def watched_call_returns(self, frame: Frame, outputs: Found) -> None:
        """Note where the loss code begins, without source lines: those cost too much to be noted in every step."""
        self._gradients.watched_call_returns(frame, outputs)
        self._note(frame, [value for _, value in outputs if value.requires_grad])
        totals = {} if frame.kept is None else frame.kept.totals or {}
        self._thread.finite.update(self._finite_totals(outputs, totals))

    def outermost_ended(self) -> None:
        """Pass on."""
        self._gradients.outermost_ended()

    def _note(self, frame: Frame, heads: list[Tensor]) -> None:
        thread = self._thread
        thread.add((frame.start, sequence_number()), heads)
        thread.finite.update(self._finite(heads))

    # Backward -----------------------------------------------------------------------------------------------

    def backward_begins(self, outputs: Sequence[Any], *, create_graph: bool) -> None:
        """A pass is about to start from ``outputs``; to be called when their rows have been added."""
        if self._lines is not None:
            self._lines.backward_begins(create_graph=create_graph)
        explain = self._finding is None  # the first failing pass of a step is the one that is written
        finding = self._code.backward_begins(outputs, self._thread.inside, self._known(), explain=explain)
        self._finding = self._finding or finding

    def watched_backward_begins(self, outputs: Sequence[Any]) -> None:
        """A pass is about to start in a step that is only watched: its loss code is looked at if it has failed."""
        self._pass_began = callers()
        measures = [self._session.statistics.known(loss) for loss in outputs if isinstance(loss, Tensor)]
        has_failed = any(measure is not None and not measure.finite for measure in measures)
        if has_failed and self._finding is None:
            self._finding = self._code.explain(outputs, self._thread.inside, self._known())

    def _known(self) -> Callable[[Edge], Known]:
        """Return what tells of an edge what is known of the value there."""
        values = dict(self._known_values())
        finite = self._thread.finite

        def known(edge: Edge) -> Known:
            return values.get(edge) or Known(finite=finite.get((edge[0]._sequence_nr(), edge[1])))

        return known

    def backward_ended(self, *, keeps_graph: bool) -> None:
        """A pass has ended."""
        self._code.backward_ended()
        if self._lines is not None:
            self._lines.backward_ended(keeps_graph=keeps_graph)

    def _known_values(self) -> list[tuple[Edge, Known]]:
        alive = [tensor for reference in self._thread.outputs if (tensor := reference()) is not None]
        edges = [(edge_of(tensor), tensor) for tensor in alive]
        return [(edge, Known(tensor)) for edge, tensor in edges if edge is not None]

    def _finite(self, heads: list[Tensor]) -> Iterator[tuple[tuple[int, int], bool]]:
        """Yield whether outputs are finite, by their nodes' numbers: the tensors may be gone before backward."""
        for tensor in heads:
            known = self._session.statistics.known(tensor)
            if tensor.grad_fn is not None and known is not None:
                yield (tensor.grad_fn._sequence_nr(), tensor.output_nr), known.finite

    def _finite_totals(self, outputs: Found, totals: Mapping[str, Tensor]) -> Iterator[tuple[tuple[int, int], bool]]:
        """Yield which outputs have a finite sum, by their nodes' numbers; on an accelerator nobody knows yet."""
        for path, tensor in outputs:
            total = totals.get(path)
            if total is not None and tensor.grad_fn is not None and not self._session.statistics.waits(total):
                yield (tensor.grad_fn._sequence_nr(), tensor.output_nr), bool(total.isfinite())

    # What was found -----------------------------------------------------------------------------------------

    def finding(self) -> LossFinding:
        """Return what was found in the step so far, the forward's births first; to be called after ``resolve``."""
        found = self._finding or LossFinding()
        return LossFinding([*found.births, *self._code.births()], found.reason, found.place, found.term)

    def span(self, lines: Sequence[SourceLine]) -> str | None:
        """Return between which lines the loss code is: from a call of the model, made at ``lines``, to backward."""
        ends = lines_of(self._pass_began)
        if not (lines and ends):
            return None
        first, last = lines[-1], ends[-1]
        if first.file != last.file:
            return f"{first.file}:{first.line} to {last.file}:{last.line}"
        return f"{first.file}:{first.line} to {last.line}"

    def step_ended(self) -> None:
        """Forget the step."""
        self._pass_began = ()
        self._code.drop()
        self._finding = None
        self._thread.clear()
        if self._lines is not None:
            self._lines.end()
