"""The rows of the step in flight, kept as tuples until the step ends, then turned into columns at once.

A row is appended at every boundary, so appending is all that happens there. Names, numbers and shapes are
looked up once a step, when the columns are built.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import torch

from gradtrace.capture.statistics import Measure
from gradtrace.trace.arrow import ARROW_SCHEMA, batch_of_columns
from gradtrace.trace.schema import COLUMN_NAMES, Record


class Named(Protocol):
    """Whatever a row belongs to; asked for its name when the step ends, not before."""

    @property
    def name(self) -> str | None: ...


Source = tuple[Any, str | None, int | None]
"""Of an operation's row: its name, which is asked for when the step ends, and file and line in the user's code."""


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

    @property
    def matters(self) -> bool:
        """Whether the row is to be written; known when its numbers are."""
        if self.arrived is None or self.measure is None:
            return True
        return self.measure.finite != all(measure.finite for measure in self.arrived)


class RowBuffer:
    """Collects the rows of one step. Appending is safe from several threads, also while rows are taken.

    ``seq`` is given when rows are taken: a thread that is interrupted in the middle of ``append`` cannot come
    late with a number that has been passed already.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seq = itertools.count()
        self._lock = threading.RLock()
        self._rows: list[tuple[Any, ...]] = []
        self._taken = 0
        self._arrays: dict[str, tuple[list[Any], pa.Array[Any]]] = {}
        self._text_of: dict[Any, str | None] = {None: None}

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
        """Add a row."""
        self._rows.append((micro_step, phase, owner, call, tensor, path, measure, detail, arrived, source))

    @property
    def position(self) -> int:
        """How many rows there have been before the next one."""
        return self._taken + len(self._rows)

    def between(self, start: int, end: int | None = None) -> list[Row]:
        """Return the rows from one position up to another that are still here; their ``seq`` is the position."""
        with self._lock:
            first = max(start - self._taken, 0)
            rows = self._rows[first : None if end is None else max(end - self._taken, 0)]
            return [Row(self._taken + first + index, *values) for index, values in enumerate(rows)]

    def bring_forward(self, start: int, end: int) -> None:
        """Put the rows from position ``end`` on before those that are between ``start`` and ``end``."""
        with self._lock:
            first, last = max(start - self._taken, 0), max(end - self._taken, 0)
            self._rows[first:] = self._rows[last:] + self._rows[first:last]

    def withdraw(self, start: int) -> list[Row]:
        """Take the rows from a position on out again: they come before those in front of them."""
        with self._lock:
            first = max(start - self._taken, 0)
            withdrawn = self._rows[first:]
            del self._rows[first:]
        return [Row(next(self._seq), *values) for values in withdrawn]

    def replace(self, start: int, end: int, rows: Sequence[Row]) -> None:
        """Put ``rows`` in the place of those between two positions; their ``seq`` does not matter."""
        with self._lock:
            first, last = max(start - self._taken, 0), max(end - self._taken, 0)
            self._rows[first:last] = [tuple(row[1:]) for row in rows]

    def are_all(self, *phases: str) -> bool:
        """Whether all rows are of these phases."""
        return all(row[1] in phases for row in self._rows)

    def take(self) -> list[Row]:
        """Return all rows in order of ``seq`` and start anew."""
        return [Row(next(self._seq), *values) for values in self._cut()]

    def exchange(self, function: Callable[[list[Row]], list[Row]]) -> None:
        """Have all rows exchanged for others, whose ``seq`` does not matter; positions go on as if none were gone."""
        with self._lock:
            rows = function([Row(0, *values) for values in self._rows])
            self._taken += len(self._rows) - len(rows)
            self._rows[:] = [tuple(row[1:]) for row in rows]

    def _cut(self) -> list[tuple[Any, ...]]:
        with self._lock:
            count = len(self._rows)
            cut = self._rows[:count]
            del self._rows[:count]
            self._taken += count
        return cut

    def batch(self, rows: list[Row], step: int, time: datetime) -> pa.RecordBatch:
        """Return the rows as one Arrow batch of step ``step``, which ended at ``time``."""
        seq, micro_step, phase, owners, call, tensor, path, measures, detail, _, sources = map(
            list, zip(*rows, strict=True)
        )
        measures = [_NOTHING if measure is None else measure for measure in measures]
        same = len(rows)
        sources = [source or (None, None, None) for source in sources]
        names = {owner: None if owner is None else owner.name for owner in set(owners)}
        columns: dict[str, Any] = dict.fromkeys(COLUMN_NAMES, [None] * same)
        columns.update(
            rank=[self._rank] * same,
            seq=seq,
            micro_step=micro_step,
            call=call,
            phase=phase,
            module=[names[owner] for owner in owners],
            tensor=tensor,
            path=path,
            dtype=self._texts([m.dtype for m in measures]),
            shape=self._texts([m.shape for m in measures]),
            device=self._texts([m.device for m in measures]),
            numel=[m.numel for m in measures],
            nan_count=[m.nan for m in measures],
            posinf_count=[m.posinf for m in measures],
            neginf_count=[m.neginf for m in measures],
            min=[m.min for m in measures],
            max=[m.max for m in measures],
            norm=[m.norm for m in measures],
            op=[None if op is None else str(op) for op, _, _ in sources],
            file=[file for _, file, _ in sources],
            line=[line for _, _, line in sources],
            detail=detail,
        )
        return self._batch(columns, _repeated("step", step, same) | _repeated("time", time, same))

    def _batch(self, columns: dict[str, list[Any]], repeated: dict[str, pa.Array[Any]]) -> pa.RecordBatch:
        """Turn columns into Arrow's; most are what they were in the step before, and so are their arrays."""
        known = {name: array for name, (values, array) in self._arrays.items() if values == columns[name]}
        batch = batch_of_columns({**columns, **known, **repeated})
        self._arrays = {name: (values, batch.column(name)) for name, values in columns.items()}
        return batch

    def _texts(self, values: list[Any]) -> list[str | None]:
        """Return types, shapes and devices as the file names them; a run has few different ones."""
        texts = self._text_of
        for value in set(values).difference(texts):
            texts[value] = str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
        return [texts[value] for value in values]


def records_that_matter(rows: Iterable[Row], step: int, rank: int) -> list[Record]:
    """Return what the incident rules want to see of a step: its non-finite rows, loss scales and start states."""
    return [
        record_of(row, step, rank)
        for row in rows
        if row.measure is not None
        and row.source is None
        and (row.tensor == "loss_scale" or row.measure.nan or row.measure.posinf or row.measure.neginf)
    ]


def record_of(row: Row, step: int, rank: int) -> Record:
    """Return a row as the incident rules know it."""
    measure = row.measure or _NOTHING
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
        numel=measure.numel,
        nan_count=measure.nan,
        posinf_count=measure.posinf,
        neginf_count=measure.neginf,
        min=measure.min,
        max=measure.max,
        norm=measure.norm,
        detail=row.detail,
    )


def _repeated(name: str, value: Any, count: int) -> dict[str, pa.Array[Any]]:
    """Return the column ``name`` with one value in all its rows; a list of times is slow to convert."""
    return {name: pa.repeat(pa.scalar(value, ARROW_SCHEMA.field(name).type), count)}


class _Nothing:
    """The measure of a row that has none: an event."""

    dtype = shape = device = numel = nan = posinf = neginf = min = max = norm = None


_NOTHING: Any = _Nothing()
