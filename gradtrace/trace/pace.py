"""Whether a run is written more slowly than it trains, and how many of its steps are to be thinned for that.

Arithmetic on durations alone: when a write began and when it was over. What is done about it is the capture's business.

Writing takes up to 8 % of a step's time where the disk is healthy, and the machine loaded three times over. So it is
too much from a third on, and little again below a twelfth: a level less doubles at most what writing takes, so that
what has been given back is not taken away again at once. A verdict is on a period of at least two seconds and four
steps, and it takes two in a row: one hiccup, however long, falls into one period, and so does the start of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, TypeVar

TOO_MUCH = 1 / 3
"""From this share of the time on that writing steps in full takes, the disk is slower than the training."""

LITTLE = TOO_MUCH / 4
"""Below this share, more steps can be written in full."""

PERIOD = 2.0
FEWEST_STEPS = 4
"""A period is over after so many seconds and so many steps, whichever comes last."""

BAD_PERIODS = 2
CALM_PERIODS = 4
"""So many in a row make steps thinned, and fewer of them."""

_REST = 32
"""So many periods later it is tried again where it was no help."""

HIGHEST_LEVEL = 16
_FEWEST_WRITES = 2
_AIM = TOO_MUCH / 2
_AIMED_RATIO = _AIM / (1 - _AIM)
"""The time of writing steps in full to all other time, as it is to be."""

_Number = TypeVar("_Number", int, float)

Kind = Literal["full", "thinned", "watched"]
"""What was written of a step that was captured in full, or all of one that was only watched."""


class Pace:
    """Takes the time of each write; ``every`` says that of the steps one in so many can be written in full.

    It is a power of two and counts by the number of the step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._level = 0
        self._rest = 0
        self._bad = self._calm = 0
        self._began = 0.0
        self._start: float | None = None
        self._step: int | None = None
        self._steps = 0
        self._writing: dict[Kind, float] = _of_each_kind(0.0)
        self._set_level(0)

    @property
    def every(self) -> int:
        """Of how many steps one is to be written in full."""
        return 1 << self._level

    def begins(self) -> None:
        """There is something to write, and the training waits from now on."""
        self._began = self._clock()

    def ended(self, step: int, kind: Kind) -> None:
        """It has been written, as all or a part of ``step``: the training goes on."""
        now = self._clock()
        if self._start is None:  # the first rows are the state that the run starts with, too
            self._start, self._step = now, step
            return
        self._count(now - self._began, kind)
        if step != self._step:
            self._step = step
            self._steps += 1
        if self._steps >= FEWEST_STEPS and now - self._start >= PERIOD:
            elapsed = now - self._start
            self._judge(self._writing["full"] / elapsed, sum(self._writing.values()) / elapsed)
            self._start, self._writing, self._steps = now, _of_each_kind(0.0), 0

    def _count(self, took: float, kind: Kind) -> None:
        self._writing[kind] += took
        self._took[kind] += took
        self._writes[kind] += 1

    def _judge(self, share: float, share_of_all: float) -> None:
        """Draw the consequence from one period: what share of it was spent on steps in full, and on all steps."""
        self._rest = max(self._rest - 1, 0)
        self._bad = self._bad + 1 if share > TOO_MUCH else 0
        self._calm = self._calm + 1 if share < LITTLE else 0
        if self._level and share_of_all > TOO_MUCH and self._is_no_help():
            self._set_level(0)
            self._rest = _REST
        elif self._bad and self._level:
            self._set_level(min(self._level + _levels_more(share), HIGHEST_LEVEL))
        elif self._bad >= BAD_PERIODS and not self._rest:
            self._set_level(1)  # half of them at first: that shows whether it helps
        elif self._calm >= CALM_PERIODS and self._level:
            self._set_level(self._level - 1)

    def _is_no_help(self) -> bool:
        """Whether a thinned step takes about as long as a full one: it is not for its size that a write is slow."""
        if min(self._writes["full"], self._writes["thinned"]) < _FEWEST_WRITES:
            return False
        full, thinned = (self._took[kind] / self._writes[kind] for kind in ("full", "thinned"))
        return thinned > full / 2

    def _set_level(self, level: int) -> None:
        self._level = level
        self._bad = self._calm = 0
        self._took: dict[Kind, float] = _of_each_kind(0.0)
        self._writes: dict[Kind, int] = _of_each_kind(0)


def _of_each_kind(zero: _Number) -> dict[Kind, _Number]:
    return {"full": zero, "thinned": zero, "watched": zero}


def _levels_more(share: float) -> int:
    """Return by how many levels writing in full has to become less."""
    ratio = share / max(1 - share, 1e-9)
    return max(math.ceil(math.log2(ratio / _AIMED_RATIO)), 1)
