"""The gradients of a step that is only watched: read once, all together, when a backward pass has ended.

What a captured step records of each gradient as it arrives is here one number, the norm of them all; a gradient
that is not finite gets a row of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradtrace.capture.held import TensorEntry
from gradtrace.capture.session import CANNOT_MEASURE, Session, quiet
from gradtrace.capture.statistics import Measure
from gradtrace.capture.watch.tensors import Pairs, WatchedTensors, by_device, versions

_SMALLEST = 1e-15
"""A norm below this says that squares have gone below what float32 holds with full precision, where it is slow."""
_GROWN = 1e-9
"""A sum beyond this says that a gradient does not vanish any more; of a million elements it may still be below."""
_LOOKS = 32
"""A gradient that vanishes is looked at closely in one of so many passes."""

_Question = Callable[[Sequence[Tensor], Callable[[list[float]], None]], None]


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
        self._vanishing: dict[TensorEntry, float] = {}
        """Norms of gradients whose squares float32 can hardly hold, as of the last exact look."""
        self._passes = 0
        self._as_left: list[tuple[int, int]] = []
        """Ids and versions of the gradients, as the last pass has left them."""
        self._tensors = tensors

    def pass_ended(self) -> None:
        """A pass that accumulates gradients has ended. To be called before ``Statistics.resolve``."""
        gradients = self._gradients()
        self._as_left = _states(gradients)
        self.look(gradients)

    def update_begins(self) -> None:
        """An optimizer is about to step: gradients that have been changed since the pass are looked at again."""
        gradients = self._gradients()
        states = _states(gradients)
        if states == self._as_left:
            return
        known = set(self._as_left)
        self._as_left = states
        with quiet():
            for (entry, gradient), state in zip(gradients, states, strict=True):
                if state not in known and self._may_be_bad(gradient):
                    self._record("optimizer", entry, gradient)

    def _gradients(self) -> Pairs:
        return [(entry, gradient) for entry, p in self._tensors.parameters() if (gradient := p.grad) is not None]

    def _may_be_bad(self, gradient: Tensor) -> bool:
        return self._session.statistics.waits(gradient) or self._session.is_finite(gradient) is False

    def arrived(self, measures: Sequence[Measure]) -> None:
        """Add the row with the norm of gradients that have been measured, and recorded, as they arrived."""
        if measures:
            is_finite = all(measure.finite for measure in measures)
            square = sum((measure.norm or 0.0) ** 2 for measure in measures)
            self._add(Measure.of_number(math.sqrt(square) if is_finite else math.nan))

    def look(self, gradients: Pairs) -> None:
        """Add a row with the norm of ``gradients``, and one for each that is not finite."""
        groups = by_device(gradients)
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
        """Ask for the norms of a group, and of gradients that vanish only for their sums."""
        self._passes += 1
        if self._passes % _LOOKS == 0:
            self._vanishing.clear()
        small = [pair for pair in group if pair[0] in self._vanishing]
        others = [pair for pair in group if pair[0] not in self._vanishing] if small else group
        norm.missing += bool(small) and bool(others)
        if small:
            self._ask(self._session.statistics.totals, self._judge_totals, small, norm)
        if others:
            self._ask(self._session.statistics.norms, self._judge, others, norm)

    def _ask(self, ask: _Question, judge: Callable[..., None], group: Pairs, norm: _Norm) -> None:
        try:
            ask([gradient for _, gradient in group], functools.partial(judge, group, norm))
        except CANNOT_MEASURE as error:
            if len(group) == 1:
                self._session.cannot_measure(error)
                norm.add([])
                return
            norm.missing += len(group) - 1
            for pair in group:
                self._ask(ask, judge, [pair], norm)

    def _judge(self, group: Pairs, norm: _Norm, norms: Sequence[float]) -> None:
        """Take the norms of a group; where one is not finite, find out whether the gradient is, or its square."""
        if all(_SMALLEST < value < math.inf for value in norms):
            norm.add(norms)
            return
        with quiet():
            bad = [pair for pair, value in zip(group, norms, strict=True) if self._is_bad(pair[1], value)]
            for entry, gradient in bad:
                self._record("backward", entry, gradient)
            if not bad:
                norms = [self._exact(*pair, value) for pair, value in zip(group, norms, strict=True)]
        norm.add(norms)

    def _judge_totals(self, group: Pairs, norm: _Norm, totals: Sequence[float]) -> None:
        """Take the sums of gradients that vanished when they were last looked at closely."""
        if all(-_GROWN < total < _GROWN for total in totals):
            norm.add([self._vanishing[entry] for entry, _ in group])
        else:
            self._vanishing.clear()
            self._ask(self._session.statistics.norms, self._judge, group, norm)

    def _is_bad(self, gradient: Tensor, norm: float) -> bool:
        return not math.isfinite(norm) and self._session.is_finite(gradient) is False

    def _exact(self, entry: TensorEntry, gradient: Tensor, norm: float) -> float:
        """Return the norm of a finite gradient, given what it came to in the gradient's own precision."""
        if _SMALLEST < norm < math.inf:
            return norm
        largest = gradient.abs().amax()
        exact = float(torch.linalg.vector_norm(gradient / largest, dtype=torch.float32).item() * largest.item())
        if norm <= _SMALLEST:
            self._vanishing[entry] = exact = 0.0 if math.isnan(exact) else exact
        return exact

    def _record(self, phase: str, entry: TensorEntry, gradient: Tensor) -> None:
        """Add the row of a gradient that is not finite, or on an accelerator may not be."""
        detail = self._session.clock.detail if phase == "backward" else None
        self._session.record(phase, entry.owner, "grad", entry.name, gradient, detail=detail, once=False, arrived=())


def _states(gradients: Pairs) -> list[tuple[int, int]]:
    tensors = [gradient for _, gradient in gradients]
    return list(zip(map(id, tensors), versions(tensors), strict=True))
