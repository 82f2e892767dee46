"""Which steps watch mode captures in full: the first ones, and a few after something unusual.

Pure: numbers of finished steps in, decisions about the steps after them out. Steps are counted as they begin;
their numbers, which a script may set as it likes, only name them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gradtrace.errors import CaptureError

_FREE = 100
"""The steps at the start of a run to which ``share`` does not apply."""
_FEWEST = 10
"""A median of fewer values says nothing yet."""


@dataclass(frozen=True)
class Triggers:
    """What makes watch mode capture steps in full.

    Args:
        first: so many steps at the start.
        after: so many steps after something unusual; 0 for none.
        lr_factor: a learning rate that changed by more than this factor in one step is unusual.
        spike_factor: so is a loss or a gradient norm that exceeds this many times its running median,
        spike_window: which is that of so many steps.
        share: of the steps after the first 100, at most this part is captured because of something unusual.
        changed_first: so many steps at the start where the model differs from that of an earlier run.

    Raises:
        CaptureError: one of them makes no sense.
    """

    first: int = 5
    after: int = 3
    lr_factor: float = 2.0
    spike_factor: float = 10.0
    spike_window: int = 100
    share: float = 0.01
    changed_first: int = 20

    def __post_init__(self) -> None:
        for name in ("first", "after", "changed_first"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more steps")
        for name in ("lr_factor", "spike_factor"):
            value = getattr(self, name)
            _check(name, value, 1 < value < math.inf, "a factor above 1")
        _check("spike_window", self.spike_window, self.spike_window >= _FEWEST, f"{_FEWEST} or more steps")
        _check("share", self.share, 0 <= self.share <= 1, "a part from 0 to 1")


def _check(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise CaptureError(f"the trigger {name} cannot be {value}; it is {wanted}")


class WatchSchedule:
    """Decides step by step what is captured in full.

    A step is decided upon when it begins, and nothing that is learned later changes that: not the numbers of the
    step before, which an accelerator may hand over late.
    """

    def __init__(self, triggers: Triggers | None = None, also: Callable[[int], bool] = lambda step: False) -> None:
        """``also`` tells of a step's number whether it is captured whatever the triggers say; such a step is no switch
        and does not count towards the share.
        """
        self._triggers = triggers or Triggers()
        self._also = also
        self._begun = 0
        self._decided: deque[tuple[int, bool]] = deque(maxlen=2)
        self._first = self._triggers.first
        self._until = 0
        self._spent = 0
        self._why = "the first step" if self._first == 1 else f"the first {self._first} steps"
        self._in_full = False
        self._rates: dict[str, float] = {}
        self._loss = RunningMedian(self._triggers.spike_window)
        self._gradient_norm = RunningMedian(self._triggers.spike_window)
        self._incident = False

    def captures(self, step: int) -> bool:
        """Whether a step is captured in full: the one in flight, the one before it, or one that is yet to begin."""
        for number, captured in reversed(self._decided):
            if number == step:
                return captured
        return self._is_due() or self._also(step)

    def switch(self, step: int) -> str | None:
        """Note that a step begins; return the words for an event if full capture begins or ends with it.

        There are words, too, when full capture goes on for a reason of its own. Asking again about the step in
        flight changes nothing.
        """
        if self._decided and self._decided[-1][0] == step:
            return None
        due, also = self._is_due(), self._also(step)
        self._decided.append((step, due or also))
        if due and not also and self._begun >= max(self._first, _FREE):
            self._spent += 1
        self._begun += 1
        return self._words(step, due, also)

    def observe(
        self,
        step: int,
        *,
        loss: float | None,
        gradient_norm: float | None,
        rates: Mapping[str, float],
        incident: bool,
    ) -> None:
        """Take in what a finished step was like; the steps that begin from now on are decided upon by that.

        ``rates`` are learning rates by the path of their row. None, NaN and infinities are compared with nothing.
        Several steps with ``incident`` in a row are one incident.
        """
        reasons = [
            *([f"an incident began in step {step}"] if incident and not self._incident else []),
            *self._changed_rate(rates),
            *self._spike("loss", self._loss, loss),
            *self._spike("gradient norm", self._gradient_norm, gradient_norm),
        ]
        self._incident = incident
        if reasons:
            self._capture_after("; ".join(reasons))

    def model_differs(self, words: str) -> None:
        """The model is not that of the earlier run: more steps at the start are captured in full, if it is not over."""
        first = self._triggers.changed_first
        if first > max(self._first, self._begun):
            self._first = first
            self._why = f"the first {first} steps, because the model differs from that of the earlier run: {words}"

    def _is_due(self) -> bool:
        return self._begun < max(self._first, self._until)

    def _words(self, step: int, due: bool, also: bool) -> str | None:
        words = None
        if due and self._why:
            words = f"captured in full from step {step}" if not self._in_full else "captured in full for longer"
            words += f": {self._why}"
            self._in_full, self._why = True, ""
        elif self._in_full and not due and not also:
            words = f"watched from step {step}"
            self._in_full = False
        return words

    def _capture_after(self, why: str) -> None:
        """Capture the next steps, if there is something left of the share for the first of them that is not yet due."""
        end = self._begun + self._triggers.after
        start = max(self._begun, self._first, self._until)
        if end <= start:
            return
        due = max(0, self._until - max(self._begun, self._first, _FREE))
        allowed = self._triggers.share * (start - _FREE + 1)
        if start >= _FREE and self._spent + due + 1 > allowed + 1e-9:  # a hundredth is no binary fraction
            return
        self._until = end
        self._why = why

    def _changed_rate(self, rates: Mapping[str, float]) -> Iterator[str]:
        changed = []
        for path, rate in rates.items():
            if not math.isfinite(rate):
                continue
            before = self._rates.get(path, rate)
            low, high = sorted((abs(before), abs(rate)))
            if high > self._triggers.lr_factor * low:
                changed.append((path, before, rate))
            self._rates[path] = rate
        if changed:
            path, before, rate = changed[0]
            which = f" of {path}" if len(self._rates) > 1 else ""
            yield f"the learning rate{which} went from {before:g} to {rate:g}"

    def _spike(self, name: str, median: RunningMedian, value: float | None) -> Iterator[str]:
        value = None if value is None else abs(value)
        factor, usual = self._triggers.spike_factor, median.value
        if value is not None and usual is not None and math.isfinite(value) and value > factor * usual:
            yield f"the {name} was {value:.4g}, more than {factor:g} times its median of {usual:.4g}"
        median.add(value)


class RunningMedian:
    """The median of the last ``window`` values, of those that are finite."""

    def __init__(self, window: int) -> None:
        self._last: deque[float | None] = deque()
        self._window = window
        self._sorted: list[float] = []
        self._is_in_order = True

    @property
    def value(self) -> float | None:
        """The median; None while fewer than ten of the values are finite."""
        count = len(self._sorted)
        if count < _FEWEST:
            return None
        low, high = self._sorted[(count - 1) // 2], self._sorted[count // 2]
        return low + (high - low) / 2

    def add(self, value: float | None) -> None:
        """Take in the next value; one that is absent or not finite takes a place and counts for nothing."""
        if not self._is_in_order:  # a signal's handler has raised in the middle of it
            self._sorted = sorted(number for number in self._last if number is not None)
        self._is_in_order = False
        if len(self._last) == self._window:
            oldest = self._last.popleft()
            if oldest is not None:
                del self._sorted[bisect_left(self._sorted, oldest)]
        kept = value if value is not None and math.isfinite(value) else None
        self._last.append(kept)
        if kept is not None:
            insort(self._sorted, kept)
        self._is_in_order = True
