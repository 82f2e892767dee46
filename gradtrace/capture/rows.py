"""The rows of the step in flight, kept as tuples until the step ends, then turned into columns at once.

A row is appended at every boundary, so appending is all that happens there. Names, numbers and shapes are
looked up once a step, when the columns are built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from gradtrace.capture.statistics import Measure
from gradtrace.trace.schema import COLUMN_NAMES, Record, batch_of_columns


class Named(Protocol):
    """Whatever a row belongs to; asked for its name when the step ends, not before."""

    @property
    def name(self) -> str | None: ...


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
        self._rows: list[tuple[Any, ...]] = []
        self._shapes: dict[Any, str] = {}

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
    ) -> None:
        """Add a row."""
        self._rows.append((micro_step, phase, owner, call, tensor, path, measure, detail, arrived))

    def take(self) -> list[Row]:
        """Return all rows in order of ``seq`` and start anew."""
        return [Row(next(self._seq), *values) for values in self._cut()]

    def drop(self) -> None:
        """Start anew without the rows."""
        self._cut()

    def _cut(self) -> list[tuple[Any, ...]]:
        count = len(self._rows)
        cut = self._rows[:count]
        del self._rows[:count]
        return cut

    def batch(self, rows: list[Row], step: int, time: datetime) -> pa.RecordBatch:
        """Return the rows as one Arrow batch of step ``step``, which ended at ``time``."""
        measures = [row.measure or _NOTHING for row in rows]
        nothing = [None] * len(rows)
        columns: dict[str, Any] = dict.fromkeys(COLUMN_NAMES, nothing)
        columns.update(
            rank=[self._rank] * len(rows),
            step=[step] * len(rows),
            time=[time] * len(rows),
            seq=[row.seq for row in rows],
            micro_step=[row.micro_step for row in rows],
            call=[row.call for row in rows],
            numel=[m.numel for m in measures],
            nan_count=[m.nan for m in measures],
            posinf_count=[m.posinf for m in measures],
            neginf_count=[m.neginf for m in measures],
            min=[m.min for m in measures],
            max=[m.max for m in measures],
            norm=[m.norm for m in measures],
        )
        columns.update(
            phase=_words(row.phase for row in rows),
            module=_words(row.owner.name if row.owner else None for row in rows),
            tensor=_words(row.tensor for row in rows),
            path=_words(row.path for row in rows),
            dtype=_words(_type_name(m.dtype) for m in measures),
            shape=_words(self._shape(m.shape) for m in measures),
            device=_words(None if m.device is None else str(m.device) for m in measures),
            detail=_words(row.detail for row in rows),
        )
        return batch_of_columns(columns)

    def _shape(self, shape: Any) -> str | None:
        if shape is None:
            return None
        text = self._shapes.get(shape)
        if text is None:
            text = self._shapes[shape] = str(list(shape))
        return text


def records_that_matter(rows: Iterable[Row], step: int, rank: int) -> list[Record]:
    """Return what the incident rules want to see of a step: its non-finite rows, loss scales and start states."""
    return [
        _record(row, step, rank)
        for row in rows
        if row.measure is not None
        and (row.tensor == "loss_scale" or row.measure.nan or row.measure.posinf or row.measure.neginf)
    ]


def _record(row: Row, step: int, rank: int) -> Record:
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
    )


def _type_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


class _Nothing:
    """The measure of a row that has none: an event."""

    dtype = shape = device = numel = nan = posinf = neginf = min = max = norm = None


_NOTHING: Any = _Nothing()


def _words(values: Iterable[str | None]) -> pa.Array[Any]:
    """Dictionary-encode a column of few different words."""
    codes: dict[str, int] = {}
    indices = [None if v is None else codes.setdefault(v, len(codes)) for v in values]
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(list(codes), pa.string()))
