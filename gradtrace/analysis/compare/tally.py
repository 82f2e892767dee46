"""What the stretches of a comparison add up to: per module counts, its first difference and its largest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gradtrace.analysis.compare.pairs import Group, Place, Step
from gradtrace.analysis.compare.parts import Kinds, ScalarChange, Unmatched


class Shared(NamedTuple):
    """A step that both runs have: records of both together, and whether both captured it in full."""

    step: int
    records: int
    full: bool


@dataclass
class Line:
    """What has been seen of one module."""

    compared: int = 0
    differing: int = 0
    first: Place | None = None
    worst: Place | None = None


@dataclass
class Tally:
    """The sum over stretches and ranks; steps are those of any rank."""

    lines: dict[str | None, Line] = field(default_factory=lambda: defaultdict(Line))
    dtypes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    devices: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    only_a: dict[str | None, Unmatched] = field(default_factory=dict)
    only_b: dict[str | None, Unmatched] = field(default_factory=dict)
    scalars: list[ScalarChange] = field(default_factory=list)
    steps_a: set[int] = field(default_factory=set)
    steps_b: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    partial: set[int] = field(default_factory=set)

    @property
    def compared(self) -> int:
        """Number of records that were compared."""
        return sum(line.compared for line in self.lines.values())

    @property
    def differing(self) -> list[tuple[str | None, Line]]:
        """The modules that differ: the one furthest apart first, of equal ones that which differed first."""
        found = [(module, line) for module, line in self.lines.items() if line.worst is not None]
        return sorted(found, key=lambda item: _badness(item[1].worst))

    @property
    def first(self) -> Place | None:
        """The first difference of all."""
        return min((line.first for line in self.lines.values() if line.first), key=_order, default=None)

    def meet(self, a: dict[int, Step], b: dict[int, Step]) -> list[Shared]:
        """Note the steps of a rank in both runs; return those that both have, in order."""
        self.steps_a |= a.keys()
        self.steps_b |= b.keys()
        shared = [
            Shared(step, a[step].records + b[step].records, a[step].full and b[step].full) for step in a if step in b
        ]
        self.shared |= {step.step for step in shared}
        self.partial |= {step.step for step in shared if not step.full}
        return shared

    def add(self, groups: Iterable[Group]) -> None:
        """Note what one stretch says."""
        for group in groups:
            line = self.lines[group.module]
            line.compared += group.compared
            line.differing += group.differing
            line.first = min(filter(None, (line.first, group.first)), key=_order, default=None)
            line.worst = min(filter(None, (line.worst, group.worst)), key=_badness, default=None)
            if group.dtypes and group.compared:
                self.dtypes[group.dtypes] += group.compared
            if group.devices and group.compared:
                self.devices[group.devices] += group.compared
            _add(self.only_a, group.module, group.only_a, group.first_only_a)
            _add(self.only_b, group.module, group.only_b, group.first_only_b)


def kinds(found: dict[tuple[str, str], int]) -> Iterator[Kinds]:
    """Yield the pairs of dtypes or devices, the most frequent first."""
    for (a, b), records in sorted(found.items(), key=lambda item: (-item[1], item[0])):
        yield Kinds(a, b, records)


def _add(only: dict[str | None, Unmatched], module: str | None, records: int, step: int | None) -> None:
    if step is not None:
        before = only.get(module, Unmatched(module, 0, step))
        only[module] = Unmatched(module, before.records + records, min(before.first_step, step))


def _order(place: Place | None) -> tuple[int, int, int]:
    """Order of execution. Each rank counts its records on its own, so that of several ranks the step decides first."""
    assert place is not None
    return place.step, place.seq_a, place.rank_a


def _badness(place: Place | None) -> tuple[float, tuple[int, int, int]]:
    assert place is not None
    return -place.difference, _order(place)
