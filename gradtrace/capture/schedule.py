"""Which steps are captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gradtrace.errors import CaptureError


class Captures(Protocol):
    """Decides which steps are captured in full."""

    def captures(self, step: int) -> bool:
        """Whether ``step`` is to be captured in full; all others are watched."""


@dataclass(frozen=True)
class Schedule:
    """Every ``every``-th step of those from ``first`` up to, not including, ``end``.

    The step at ``first`` is always captured, so that a short run is never empty. None leaves an end open. ``also``
    holds steps that are captured besides.

    Raises:
        CaptureError: ``every`` is below 1, or no step lies between ``first`` and ``end``.
    """

    every: int = 1
    first: int | None = None
    end: int | None = None
    also: range = range(0)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise CaptureError(f"every={self.every} captures nothing; use 1 for every step")
        if self.end is not None and self.end <= (self.first or 0):
            raise CaptureError(f"no step lies in {self.first or 0}:{self.end}; A:B is A up to, not including, B")

    def captures(self, step: int) -> bool:
        """Whether ``step`` is to be captured."""
        first = self.first or 0
        if step in self.also:
            return True
        if step < first or (self.end is not None and step >= self.end):
            return False
        return (step - first) % self.every == 0
