"""The rows of the step in flight, kept as they come until the step ends, then turned into columns at once.

A row is appended at every boundary, so appending is all that happens there. Names, numbers and shapes are looked up
once a step, when the columns are built (``columns.py``).
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from gradtrace.capture.columns import Columns
from gradtrace.capture.measures import NOTHING, Measure
from gradtrace.capture.sites import Named, Site, Source
from gradtrace.trace.schema import Record

__all__ = ["Named", "Row", "RowBuffer", "Rows"]

_MOST_SITES = 1_000
"""Of the sites that nobody else keeps; a run that trains many models one after the other has ever more."""

_MATTERING = frozenset({"output", "loss", "grad", "buffer", "param", "loss_scale"})
"""Tensors that the rules of incidents look at."""

_counts = operator.attrgetter("counts")
_is_pending = operator.attrgetter("pending")
_tensor = operator.attrgetter("tensor")

Entry = tuple[Site, int, int | None, Measure, Sequence[Measure] | None]
"""A row as it is kept: its site, micro step, call, measure, and what had arrived where it is a final gradient."""


class Row(NamedTuple):
    """One record of the step in flight."""

    seq: int
    micro_step: int
    phase: str
    owner: Named | None
    call: int | None
    tensor: str
    path: str
    measure: Measure | None
    detail: str | None
    arrived: Sequence[Measure] | None
    """Of a final gradient: what arrived. The row is left out where both are finite, or neither is."""
    source: Source | None = None

    @property
    def pending(self) -> bool:
        """Whether the row's numbers are still on an accelerator."""
        return self.measure is not None and self.measure.pending

    @classmethod
    def of(cls, seq: int, entry: Entry) -> Row:
        """Return a row as others than its keeper see it."""
        site, micro_step, call, known, arrived = entry
        measure = None if known is NOTHING else known
        owner, tensor, path = site.owner, site.tensor, site.path
        return cls(seq, micro_step, site.phase, owner, call, tensor, path, measure, site.detail, arrived, site.source)


class Rows:
    """Rows that have been taken out of the buffer, with their ``seq``, by columns.

    What is asked of them is asked of a whole column, which costs little: a step has hundreds of rows.
    """

    def __init__(self, entries: list[Entry], seqs: list[int]) -> None:
        self.entries = entries
        self.seqs = seqs
        columns: Iterable[Any] = zip(*entries, strict=True) if entries else ((), (), (), (), ())
        self.sites, self.micro_steps, self.calls, self.measures, self._arrived = columns

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Row]:
        return map(Row.of, self.seqs, self.entries)

    def moved(self, shift: int) -> Rows:
        """Return the rows with their micro steps moved up."""
        return Rows([(e[0], e[1] + shift, e[2], e[3], e[4]) for e in self.entries], self.seqs)

    def ready(self) -> tuple[Rows, Rows]:
        """Return the rows up to the first whose numbers are still on an accelerator, and the rest."""
        pending = list(map(_is_pending, self.measures))
        if True not in pending:
            return self, Rows([], [])
        first = pending.index(True)
        return Rows(self.entries[:first], self.seqs[:first]), Rows(self.entries[first:], self.seqs[first:])

    def to_be_written(self) -> Rows:
        """Return the rows without the final gradients that are as finite as what arrived."""
        if self._arrived.count(None) == len(self.entries):
            return self
        kept = [index for index, entry in enumerate(self.entries) if entry[4] is None or _differs(entry)]
        return Rows([self.entries[index] for index in kept], [self.seqs[index] for index in kept])

    def has_event(self, name: str) -> bool:
        """Whether one of the rows is an event of this name."""
        return name in map(_tensor, self.sites) and any(s.tensor == name and s.phase == "event" for s in self.sites)

    def records_that_matter(self, step: int, rank: int) -> list[Record]:
        """Return what the incident rules want to see of a step: its non-finite rows, loss scales and start states."""
        counts = list(map(_counts, self.measures))
        if counts.count(None) == len(counts) and "loss_scale" not in map(_tensor, self.sites):
            return []
        return [
            record_of(Row.of(seq, entry), step, rank)
            for seq, entry, found in zip(self.seqs, self.entries, counts, strict=True)
            if (found is not None or (entry[0].tensor == "loss_scale" and entry[3] is not NOTHING))
            and entry[0].tensor in _MATTERING
            and entry[0].source is None
        ]


class RowBuffer:
    """Collects the rows of one step. Adding is safe from several threads, also while rows are taken.

    ``seq`` is given when rows are taken: a thread that is interrupted in the middle of ``append`` cannot come
    late with a number that has been passed already.
    """

    def __init__(self, rank: int) -> None:
        self._columns = Columns(rank)
        self._seq = itertools.count()
        self._lock = threading.RLock()
        self._rows: list[Entry] = []
        self._taken = 0
        self._sites: dict[tuple[str, Named | None, str, str], Site] = {}
        self.add = self._rows.append
        """Adds a row."""

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self,
        micro_step: int,
        phase: str,
        owner: Named | None,
        call: int | None,
        tensor: str,
        path: str,
        measure: Measure | None,
        detail: str | None = None,
        arrived: Sequence[Measure] | None = None,
        source: Source | None = None,
    ) -> None:
        """Add a row of which nobody has kept the site."""
        self.add(self._entry(Row(0, micro_step, phase, owner, call, tensor, path, measure, detail, arrived, source)))

    def _entry(self, row: Row) -> Entry:
        if row.phase == "event" or row.source is not None:
            site = Site(row.phase, row.owner, row.tensor, row.path, row.detail, row.source)
        else:
            site = self._site(row.phase, row.owner, row.tensor, row.path)
            site = site if row.detail is None else site.remarked(row.detail)
        return site, row.micro_step, row.call, NOTHING if row.measure is None else row.measure, row.arrived

    def _site(self, phase: str, owner: Named | None, tensor: str, path: str) -> Site:
        key = (phase, owner, tensor, path)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= _MOST_SITES:
                self._sites.clear()
            site = self._sites[key] = Site(phase, owner, tensor, path)
        return site

    @property
    def position(self) -> int:
        """How many rows there have been before the next one."""
        return self._taken + len(self._rows)

    def between(self, start: int, end: int | None = None) -> list[Row]:
        """Return the rows from one position up to another that are still here; their ``seq`` is the position."""
        with self._lock:
            first = max(start - self._taken, 0)
            entries = self._rows[first : None if end is None else max(end - self._taken, 0)]
            return list(map(Row.of, itertools.count(self._taken + first), entries))

    def bring_forward(self, start: int, end: int) -> None:
        """Put the rows from position ``end`` on before those that are between ``start`` and ``end``."""
        with self._lock:
            first, last = max(start - self._taken, 0), max(end - self._taken, 0)
            self._rows[first:] = self._rows[last:] + self._rows[first:last]

    def withdraw(self, start: int) -> Rows:
        """Take the rows from a position on out again: they come before those in front of them."""
        with self._lock:
            first = max(start - self._taken, 0)
            withdrawn = self._rows[first:]
            del self._rows[first:]
        return self._numbered(withdrawn)

    def replace(self, start: int, end: int, rows: Sequence[Row]) -> None:
        """Put ``rows`` in the place of those between two positions; their ``seq`` does not matter."""
        with self._lock:
            first, last = max(start - self._taken, 0), max(end - self._taken, 0)
            self._rows[first:last] = map(self._entry, rows)

    def exchange(self, function: Callable[[list[Row]], list[Row]]) -> None:
        """Have all rows exchanged for others, whose ``seq`` does not matter; positions go on as if none were gone."""
        with self._lock:
            rows = function([Row.of(0, entry) for entry in self._rows])
            self._taken += len(self._rows) - len(rows)
            self._rows[:] = map(self._entry, rows)

    def are_all(self, *phases: str) -> bool:
        """Whether all rows are of these phases."""
        return all(entry[0].phase in phases for entry in self._rows)

    def take(self) -> Rows:
        """Return all rows in order of ``seq`` and start anew."""
        return self._numbered(self._cut())

    def _numbered(self, entries: list[Entry]) -> Rows:
        return Rows(entries, list(itertools.islice(self._seq, len(entries))))

    def _cut(self) -> list[Entry]:
        with self._lock:
            count = len(self._rows)
            cut = self._rows[:count]
            del self._rows[:count]
            self._taken += count
        return cut

    def batch(self, rows: Rows, step: int, time: datetime) -> pa.RecordBatch:
        """Return the rows as one Arrow batch of step ``step``, which ended at ``time``."""
        return self._columns.batch(rows, step, time)


def _differs(entry: Entry) -> bool:
    """Whether a final gradient is finite where what arrived is not, or the other way round."""
    measure, arrived = entry[3], entry[4]
    return arrived is None or measure.finite != all(each.finite for each in arrived)


def record_of(row: Row, step: int, rank: int) -> Record:
    """Return a row as the incident rules know it."""
    measure = row.measure
    return Record(
        step=step,
        seq=row.seq,
        phase=row.phase,
        tensor=row.tensor,
        module=row.owner.name if row.owner else None,
        path=row.path,
        call=row.call,
        micro_step=row.micro_step,
        rank=rank,
        numel=None if measure is None else measure.numel,
        nan_count=None if measure is None else measure.nan,
        posinf_count=None if measure is None else measure.posinf,
        neginf_count=None if measure is None else measure.neginf,
        min=None if measure is None else measure.min,
        max=None if measure is None else measure.max,
        norm=None if measure is None else measure.norm,
        detail=row.detail,
    )
