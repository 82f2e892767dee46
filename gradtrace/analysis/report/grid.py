"""The columns of the page: stretches of steps of one width, and which records they are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtrace.errors import NoMatchError

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

MOST_COLUMNS = 600
"""Most columns of the page: about one for two pixels of a wide screen."""

Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class Selection:
    """Which records are drawn: steps from the first bound up to, not including, the second; of one rank or of all.

    ``folded`` is true where ``report_places`` says which module stands for each.
    """

    bounds: Bounds = (None, None)
    rank: int | None = None
    folded: bool = False

    @property
    def places(self) -> dict[str, str]:
        """Where the records are, and the module that each is shown with, in SQL."""
        if self.folded:
            return {"records": "records JOIN report_places USING (module)", "module": "shown"}
        return {"records": "records", "module": "module"}

    @property
    def condition(self) -> str:
        """The same as a condition in SQL; rows of single operations are never among them."""
        first, end = self.bounds
        conditions = ["op IS NULL"]
        if first is not None:
            conditions.append(f"step >= {int(first)}")
        if end is not None:
            conditions.append(f"step < {int(end)}")
        if self.rank is not None:
            conditions.append(f"rank = {int(self.rank)}")
        return " AND ".join(conditions)


@dataclass(frozen=True)
class Grid:
    """``count`` columns of ``width`` step numbers each, from step ``first`` on; ``steps`` of them were recorded."""

    first: int = 0
    last: int = -1
    width: int = 1
    steps: int = 0

    @property
    def count(self) -> int:
        """Number of columns."""
        return -(-(self.last - self.first + 1) // self.width)

    @property
    def column(self) -> str:
        """The number of a row's column, in SQL."""
        return f"((step - {self.first}) // {self.width})::INTEGER"

    def coarser(self, factor: int) -> Grid:
        """Return the grid in which ``factor`` columns are one."""
        return Grid(self.first, self.last, self.width * factor, self.steps)


def grid_of(run: Recording, selection: Selection, most: int = MOST_COLUMNS) -> Grid:
    """Return the columns for the selected steps: one a step while there are no more than ``most``.

    Where only every Nth step was recorded a column is as wide as N or a multiple of it, so that none is empty for that.

    Raises:
        NoMatchError: the run has records, and none that was selected.
    """
    steps = _recorded(run, selection)
    if not steps:
        _refuse_nothing(run, selection)
        return Grid()
    stride = math.gcd(*(step - steps[0] for step in steps)) or 1
    columns = (steps[-1] - steps[0]) // stride + 1
    return Grid(steps[0], steps[-1], stride * -(-columns // most), len(steps))


def _recorded(run: Recording, selection: Selection) -> list[int]:
    query = f"SELECT list_sort(list(DISTINCT step)) FROM records WHERE {selection.condition}"
    steps: list[int] | None = run.execute(query).fetchall()[0][0]
    return steps or []


def _refuse_nothing(run: Recording, selection: Selection) -> None:
    ranks = [rank for (rank,) in run.execute("SELECT DISTINCT rank FROM records ORDER BY rank").fetchall()]
    if selection.rank is not None and ranks and selection.rank not in ranks:
        raise NoMatchError(f"{run.path} has no rank {selection.rank}; it has: {', '.join(map(str, ranks))}")
    first, last = run.execute("SELECT min(step), max(step) FROM records").fetchall()[0]
    if first is not None:
        asked = ":".join("" if bound is None else str(bound) for bound in selection.bounds)
        raise NoMatchError(f"no recorded step lies in {asked}; the run has {first} to {last}")
