"""Did the replay see what the step has seen? Rows of both are compared, number by number. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.capture.rows import Row
from gradtrace.capture.statistics import Measure


class Seen(NamedTuple):
    """One boundary of a module call as it was seen: whose, which tensor of it, and its numbers."""

    owner: Any
    tensor: str
    path: str
    numbers: tuple[Any, ...]

    @classmethod
    def of(cls, owner: Any, tensor: str, path: str, measure: Measure) -> Seen:
        """Return what a row holds."""
        m = measure
        return cls(owner, tensor, path, (m.dtype, m.shape, m.nan, m.posinf, m.neginf, m.min, m.max, m.norm))

    @property
    def place(self) -> str:
        """The boundary in words."""
        return f"{self.tensor} {self.path} of {self.owner.name or 'the root'}"


def first_difference(recorded: Sequence[Seen], replayed: Sequence[Seen]) -> str | None:
    """Return where a replayed forward went another way, in words; None where both are equal."""
    for then, now in zip(recorded, replayed, strict=False):
        if then != now:
            return then.place
    if len(recorded) != len(replayed):
        longer = max(recorded, replayed, key=len)
        return longer[min(len(recorded), len(replayed))].place
    return None


def any_difference(recorded: Iterable[Seen], replayed: Iterable[Seen], *, all_of_it: bool = True) -> str | None:
    """Return a boundary that differs, whatever the order: several calls' gradients may come in another one.

    ``all_of_it`` is false where recording ended before its time: then the replay may see more.
    """
    then, now = Counter(recorded), Counter(replayed)
    different = list((then - now) + (now - then)) if all_of_it else list(then - now)
    return different[0].place if different else None


def same_number(one: Tensor, other: Tensor) -> bool:
    """Whether two sums are the same number; NaN is NaN."""
    return bool(torch.equal(one, other)) or bool(one.isnan() and other.isnan())


def forward_of(rows: Sequence[Row]) -> list[Seen]:
    """Return what was seen on the way forward."""
    return _seen(rows, ("input", "forward"), ("input", "output"))


def backward_of(rows: Sequence[Row]) -> list[Seen]:
    """Return what was seen on the way back."""
    return _seen(rows, ("backward",), ("grad_output", "grad_input"))


def _seen(rows: Sequence[Row], phases: tuple[str, ...], tensors: tuple[str, ...]) -> list[Seen]:
    return [
        Seen.of(row.owner, row.tensor, row.path, row.measure)
        for row in rows
        if row.phase in phases and row.tensor in tensors and row.measure is not None
    ]
