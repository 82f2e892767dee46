"""Timing in pairs: blocks of steps without and with something take turns in one process, and ratios are within a pair.

A machine that slows down meanwhile slows both blocks of a pair, so the ratio stays. Here stand the timing, the pairing
and the interval; what is compared is in ``variants.py``.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from benchmarks.models import Training

Watch = Callable[[], AbstractContextManager[object]]
"""Switches something on for a block of steps; its start and its end are not timed."""

FEWEST_PAIRS = 6
"""Below this even the smallest and the largest of all values hold the median in less than 95 of 100 cases."""


class Block(NamedTuple):
    """Means of the steps of a block: wall time of their parts and processor time of all threads, in milliseconds."""

    forward: float
    backward: float
    step: float
    cpu: float


class Side(NamedTuple):
    """One side of a comparison: what is switched on, how many steps then pass before the timed ones.

    The timed steps are a multiple of ``period``: what happens in some steps only happens as often as it should.
    """

    watch: Watch
    warm_up: int = 1
    period: int = 1


class Clocks(NamedTuple):
    """Where the time is read, in seconds: wall and processor."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


Pair = tuple[Block, Block]
"""The base's block and the other side's."""


class Costs(NamedTuple):
    """What was measured of one model: the pairs of each variant, and why others could not be measured, by name."""

    model: str
    pairs: dict[str, list[Pair]]
    failures: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return all blocks with their names."""
        pairs = {name: [[side._asdict() for side in pair] for pair in pairs] for name, pairs in self.pairs.items()}
        return {"model": self.model, "pairs": pairs, "failures": self.failures}


def time_block(training: Training, side: Side, steps: int, clocks: Clocks = Clocks()) -> Block:  # noqa: B008
    """Return the means of ``steps`` steps under ``side``.

    Garbage is collected before the timed steps, and as Python likes during them.
    """
    with side.watch():
        for _ in range(side.warm_up):
            training.step()
        gc.collect()
        return _time_steps(training, steps, clocks)


def _time_steps(training: Training, steps: int, clocks: Clocks) -> Block:
    now, optimizer = clocks.wall, training.optimizer
    forward = backward = 0.0
    cpu, start = clocks.cpu(), now()
    for _ in range(steps):
        begin = now()
        loss = training.loss()
        middle = now()
        loss.backward()
        end = now()
        optimizer.step()
        optimizer.zero_grad()
        forward += middle - begin
        backward += end - middle
    total, cpu = now() - start, clocks.cpu() - cpu
    return Block(*(1000 * seconds / steps for seconds in (forward, backward, total, cpu)))


def steps_for(training: Training, seconds: float, clocks: Clocks = Clocks()) -> int:  # noqa: B008
    """Return how many steps, at least two, take about ``seconds``."""
    training.step()
    return max(2, math.ceil(1000 * seconds / _time_steps(training, 2, clocks).step))


class Rounds:
    """Compares several sides with one base, a pair of blocks of each in every round.

    A side that fails once is left out from then on; ``failures`` has its error in one line.
    """

    def __init__(self, training: Training, base: Side, sides: Mapping[str, Side], steps: int) -> None:
        self.pairs: dict[str, list[Pair]] = {name: [] for name in sides}
        self.failures: dict[str, str] = {}
        self._training = training
        self._base = base
        self._sides = dict(sides)
        self._steps = steps

    def run(self, count: int, clocks: Clocks = Clocks()) -> None:  # noqa: B008
        """Run ``count`` rounds."""
        for _ in range(count):
            for name in [*self._sides]:
                try:
                    self.pairs[name].append(self._pair(self._sides[name], clocks))
                except Exception as error:  # not every tool can stand every model
                    self.failures[name] = in_a_line(error)
                    del self._sides[name], self.pairs[name]
                    self._training.optimizer.zero_grad()

    def _pair(self, side: Side, clocks: Clocks) -> Pair:
        period = math.lcm(self._base.period, side.period)
        steps = period * math.ceil(self._steps / period)
        base = time_block(self._training, self._base, steps, clocks)
        return base, time_block(self._training, side, steps, clocks)


def in_a_line(error: Exception) -> str:
    """Return the first sentence of what an error says."""
    if isinstance(error, ModuleNotFoundError):
        return f"needs {(error.name or str(error)).partition('.')[0]}, which is not installed"
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first.partition('. ')[0]}"


class Estimate(NamedTuple):
    """A median with the bounds of its 95 % interval."""

    median: float
    low: float
    high: float


def ratio(pairs: Iterable[Pair], part: str = "step") -> Estimate:
    """Return the median of the pairs' ratios, second block to first, of one part of the step."""
    return estimate([getattr(side, part) / getattr(base, part) for base, side in pairs])


def difference(pairs: Iterable[Pair], part: str = "step") -> Estimate:
    """Return the median of the pairs' differences, second block less first, in milliseconds a step."""
    return estimate([getattr(side, part) - getattr(base, part) for base, side in pairs])


def estimate(values: Iterable[float]) -> Estimate:
    """Return the median with an interval that holds the true one in at least 95 of 100 cases.

    The bounds are two of the values (order statistics): with n of them, each lies below the true median with
    probability one half, so the k smallest all do less often than a binomial distribution says. No shape of the noise
    is assumed, only that the values are independent.

    Raises:
        ValueError: there are too few values for any interval.
    """
    ordered = sorted(values)
    count = len(ordered)
    if count < FEWEST_PAIRS:
        raise ValueError(f"{count} values have no 95 % interval; it takes {FEWEST_PAIRS}")
    outside, tail = 0, 1
    while tail <= 0.025 * 2**count:  # the cases in which at most `outside` values lie below the median
        outside += 1
        tail += math.comb(count, outside)
    return Estimate(statistics.median(ordered), ordered[outside - 1], ordered[count - outside])
