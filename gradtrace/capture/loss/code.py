"""The loss code: what lies between the outputs of the model and ``backward()``, outside of every module call.

Ties together the walk (``region.py``), the forward's values (``forward.py``, ``terms.py``) and the checks
in the backward pass (``checks.py``). All of it works on the graph before and while backward runs: afterwards
the graph is gone, and there is no module call to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from gradtrace.capture.graph import Edge
from gradtrace.capture.loss.checks import LossChecks
from gradtrace.capture.loss.forward import LossFinding, find_births
from gradtrace.capture.loss.region import LIMIT, Interval, loss_region, start_of
from gradtrace.capture.loss.terms import failing_term
from gradtrace.capture.loss.values import Known, Values
from gradtrace.capture.operations.births import Birth
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.statistics import Measure, Unmeasurable
from gradtrace.trace.sent import let_pass


def nothing_known(edge: Edge) -> Known:
    """Say of every edge that nothing is known of its value."""
    return Known()


class LossCode:
    """Finds the operation of the loss code that fails, in the forward or in the backward pass."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._checks = LossChecks(session)

    def backward_begins(
        self,
        outputs: Sequence[Any],
        inside: Iterable[Interval],
        known: Callable[[Edge], Known] = nothing_known,
        *,
        explain: bool = True,
    ) -> LossFinding | None:
        """Look at the loss code of a pass that is about to start from ``outputs``.

        ``inside`` are the sequence numbers of this thread's outermost module calls, ``known`` says what is known
        of the values at their outputs. Returns why the loss is non-finite; None where it is finite, where its
        numbers are not there yet (accelerators), where it was not made by loss code, and without ``explain``,
        which is for the first steps of an incident: it takes milliseconds.
        """
        nodes = self._region(outputs, inside)
        finding = self._explain(nodes, outputs, known) if explain and nodes else None
        self._checks.watch(nodes)
        return finding

    def explain(
        self, outputs: Sequence[Any], inside: Iterable[Interval], known: Callable[[Edge], Known]
    ) -> LossFinding | None:
        """Say why the loss is non-finite, as ``backward_begins`` does, and leave the pass alone."""
        nodes = self._region(outputs, inside)
        return self._explain(nodes, outputs, known) if nodes else None

    def _region(self, outputs: Sequence[Any], inside: Iterable[Interval]) -> list[Any]:
        nodes = loss_region(outputs, inside)
        if nodes is None:
            self._session.unmeasured[f"loss code of more than {LIMIT:,} operations"] += 1
        return nodes or []

    def backward_ended(self) -> None:
        """Take the hooks of the pass away."""
        self._checks.pass_ended()

    def births(self) -> list[Birth]:
        """Return the births of the backward passes since the last call; to be called after ``resolve``."""
        return self._checks.births()

    def drop(self) -> None:
        """Let go of everything."""
        self._checks.drop()

    def _explain(
        self, nodes: Sequence[Any], outputs: Sequence[Any], known: Callable[[Edge], Known]
    ) -> LossFinding | None:
        session = self._session
        tensors = [tensor for tensor in outputs if isinstance(tensor, Tensor)]
        with quiet():
            bad = dict(self._bad(tensors))
            if not bad:
                return None
            try:
                values = Values(nodes, tensors, known, session.is_finite)
                finding = find_births(nodes, bad, values, session)
                edge, measure = next(iter(bad.items()))
                finding.term = failing_term(edge, values, is_nan=measure.nan > 0)
            except Exception as error:  # the graph of somebody's own making; the rest of the capture goes on
                let_pass(error)
                session.unmeasured[f"{type(error).__name__} while looking into the loss code"] += 1
                return None
        return finding

    def _bad(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Edge, Measure]]:
        for tensor in tensors:
            edge = start_of(tensor)
            try:
                measure = self._session.statistics.measure_once(tensor)
            except (Unmeasurable, RuntimeError, TypeError) as error:
                let_pass(error)
                continue
            if edge is not None and not measure.pending and not measure.finite:
                yield edge, measure
