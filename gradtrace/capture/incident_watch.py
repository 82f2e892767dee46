"""Finds incidents while a run is recorded, from the rows as they are written; memory is bounded by what differs.

A step may have any number of passes, and a run any number of incidents: of a step's rows one of each kind is kept,
of the incidents the latest.
"""

from __future__ import annotations

from gradtrace.capture.rows import Rows
from gradtrace.trace.incident import Incident, IncidentFinder
from gradtrace.trace.schema import Record

_STATES = ("param", "buffer")


class IncidentWatch:
    """The incidents of one process. ``root_names`` are the names of its outermost modules; they may grow."""

    def __init__(self, root_names: set[str], rank: int) -> None:
        self._finder = IncidentFinder(root_names)
        self._rank = rank
        self._before = 0
        self._matters: dict[tuple[object, ...], Record] = {}
        self._skipped = False

    @property
    def count(self) -> int:
        """How many incidents there have been."""
        return self._before + len(self._finder.incidents)

    def add(self, step: int, rows: Rows) -> None:
        """Take rows of the step in flight."""
        for record in rows.records_that_matter(step, self._rank):
            self._matters.setdefault(_kind(record), record)
        self._skipped = self._skipped or rows.has_event("skip")

    def step_ends(self, step: int) -> Incident | None:
        """Return the incident that ``step``, of which all rows have been taken, is a part of."""
        is_part = self._finder.add_step(step, self._matters.values(), skipped=self._skipped)
        self._matters, self._skipped = {}, False
        found = self._finder.incidents
        self._before += len(found[:-1])
        del found[:-1]
        return found[-1] if is_part else None


def _kind(record: Record) -> tuple[object, ...]:
    """Return what tells a record from others of the step, as far as it matters to the rules of incidents."""
    place = record.phase, record.tensor, record.module, record.path, record.detail
    if record.tensor == "loss_scale":
        return *place, record.max
    if record.tensor in _STATES:
        return *place, record.nan_count, record.posinf_count, record.neginf_count
    return *place, bool(record.nan_count)
