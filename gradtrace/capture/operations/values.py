"""Which tensors hold a NaN or an infinity, each looked at once, and which operations those values come from.

A value is known by the memory that it lies in: a view shows what the operation that last wrote there has made.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.operations.guards import storage_of
from gradtrace.capture.session import quiet
from gradtrace.capture.statistics import Measure, Statistics, Unmeasurable
from gradtrace.trace.sent import let_pass

Kinds = frozenset[str]
"""Which of NaN, Infinity and -Infinity there are."""

NAN = "NaN"
FINITE: Kinds = frozenset()


def kinds_of_number(value: float) -> Kinds:
    """Return what kind of value a number is, nothing for a finite one."""
    if isinstance(value, int) or math.isfinite(value):
        return FINITE
    return frozenset([NAN if value != value else "Infinity" if value > 0 else "-Infinity"])


class Judge:
    """Looks at values, at those of one tensor once until something writes into its memory."""

    def __init__(self) -> None:
        self._statistics = Statistics(on_device=False)
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Kinds]] = {}
        self._writes: Counter[int | None] = Counter()

    def wrote(self, tensor: Tensor) -> None:
        """Note that values have changed."""
        self._writes[storage_of(tensor)] += 1

    def kinds(self, tensor: Tensor) -> Kinds:
        """Return which kinds of non-finite values a tensor holds; none where that cannot be said."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return FINITE
        writes = self._writes[storage_of(tensor)]
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == writes:
            return known[2]
        kinds = self._look(tensor)
        self._seen[id(tensor)] = weakref.ref(tensor), writes, kinds
        return kinds

    def measure(self, value: Tensor | float) -> Measure | None:
        """Return the measure of a tensor or a number, None where there is none."""
        if not isinstance(value, Tensor):
            return Measure.of_number(float(value))
        try:
            with quiet():
                return self._statistics.measure(value)
        except (Unmeasurable, RuntimeError, TypeError, NotImplementedError) as error:
            let_pass(error)
            return None

    def _look(self, tensor: Tensor) -> Kinds:
        try:
            with quiet():
                if self._statistics.all_finite(tensor):
                    return FINITE
        except (Unmeasurable, RuntimeError, TypeError, NotImplementedError) as error:
            let_pass(error)
            return FINITE
        measure = self.measure(tensor)
        if measure is None:
            return FINITE
        counts = {NAN: measure.nan, "Infinity": measure.posinf, "-Infinity": measure.neginf}
        # The magnitude of a complex number tells only whether it is finite.
        return frozenset(kind for kind, count in counts.items() if count)


def is_mask_like(measure: Measure) -> bool:
    """Whether a tensor has infinities of one sign and otherwise one value: log of a mask of ones and zeros."""
    one_sign = not measure.nan and bool(measure.posinf) != bool(measure.neginf)
    return one_sign and measure.min is not None and measure.min == measure.max


@dataclass
class _Held:
    """Non-finite values in one piece of memory; ``memory`` keeps its address from being used again."""

    memory: Any
    dtype: torch.dtype
    births: frozenset[int]


class Origins:
    """The numbers of the births that the non-finite values in each piece of memory descend from."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._held: dict[int, _Held] = {}

    def of(self, tensor: Tensor) -> frozenset[int] | None:
        """Return the births of the values in a tensor's memory, None where they come from elsewhere."""
        number = storage_of(tensor)
        held = None if number is None else self._held.get(number)
        return None if held is None else held.births

    def add(self, tensor: Tensor, births: frozenset[int]) -> None:
        """Note where the non-finite values of ``tensor`` come from, beside those that its memory held before."""
        number = storage_of(tensor)
        if number is not None:
            before = self.of(tensor) or frozenset()
            self._held[number] = _Held(tensor.untyped_storage(), tensor.dtype, before | births)

    def settle(self, tensor: Tensor) -> None:
        """Forget the memory of a tensor that has been overwritten, if nothing non-finite is left in it."""
        number = storage_of(tensor)
        held = None if number is None else self._held.get(number)
        if number is None or held is None:
            return
        with quiet():
            whole = torch.empty(0, dtype=held.dtype, device=tensor.device).set_(held.memory)
        if not self._judge.kinds(whole):
            del self._held[number]
