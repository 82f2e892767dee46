"""The gradients of a step that is only watched: read once, all together, when a backward pass has ended.

What a captured step records of each gradient as it arrives is here one number, the norm of them all; a gradient
that is not finite gets a row of its own.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.capture.names import TensorEntry
from gradtrace.capture.session import CANNOT_MEASURE, Session, quiet
from gradtrace.capture.statistics import Measure
from gradtrace.capture.watch.tensors import Pairs, WatchedTensors


class _Norm:
    """The norm of all gradients of a pass; ``missing`` devices have not told theirs yet."""

    def __init__(self, measure: Measure, missing: int) -> None:
        self.measure = measure
        self.missing = missing
        self.square = 0.0

    def add(self, norms: Sequence[float]) -> None:
        self.missing -= 1
        self.square += sum(norm * norm for norm in norms)
        if not self.missing:
            self.measure.be(math.sqrt(self.square))


class GradientWatch:
    """Looks at the gradients of a pass."""

    def __init__(self, session: Session, tensors: WatchedTensors) -> None:
        self._session = session
        self._tensors = tensors

    def pass_ended(self) -> None:
        """A pass that accumulates gradients has ended. To be called before ``Statistics.resolve``."""
        self.look([(entry, p.grad) for entry, p in self._tensors.parameters() if p.grad is not None])

    def arrived(self, measures: Sequence[Measure]) -> None:
        """Add the row with the norm of gradients that have been measured, and recorded, as they arrived."""
        if measures:
            is_finite = all(measure.finite for measure in measures)
            square = sum((measure.norm or 0.0) ** 2 for measure in measures)
            self._add(Measure.of_number(math.sqrt(square) if is_finite else math.nan))

    def look(self, gradients: Pairs) -> None:
        """Add a row with the norm of ``gradients``, and one for each that is not finite."""
        groups: dict[torch.device, list[tuple[TensorEntry, Tensor]]] = defaultdict(list)
        for entry, gradient in gradients:
            groups[gradient.device].append((entry, gradient))
        if not groups:
            return
        norm = _Norm(Measure.of_number(0.0), len(groups))
        norm.measure.pending = True
        self._add(norm.measure)
        with quiet():
            for group in groups.values():
                self._look_at(group, norm)

    def _add(self, norm: Measure) -> None:
        clock = self._session.clock
        self._session.rows.append(clock.micro_step, "backward", None, None, "grad_norm", "", norm, clock.detail)

    def _look_at(self, group: Pairs, norm: _Norm) -> None:
        session = self._session
        then = functools.partial(self._judge, group, norm)
        try:
            session.statistics.norms([gradient for _, gradient in group], then)
        except CANNOT_MEASURE as error:
            if len(group) == 1:
                session.cannot_measure(error)
                norm.add([])
                return
            norm.missing += len(group) - 1
            for pair in group:
                self._look_at([pair], norm)

    def _judge(self, group: Pairs, norm: _Norm, norms: Sequence[float]) -> None:
        """Take the norms of a group; where one is not finite, find out whether the gradient is, or its square."""
        if not all(map(math.isfinite, norms)):
            with quiet():
                bad = [pair for pair in group if self._session.is_finite(pair[1]) is False]
                for entry, gradient in bad:
                    self._record(entry, gradient)
                norms = norms if bad else [_exact_norm(gradient) for _, gradient in group]
        norm.add(norms)

    def _record(self, entry: TensorEntry, gradient: Tensor) -> None:
        detail = self._session.clock.detail
        self._session.record("backward", entry.owner, "grad", entry.name, gradient, detail=detail, once=False)


def _exact_norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64).item())
