"""Rows -> the columns of a trace. What a step has in common with one before is not made again.

In steady training the same calls come in the same order with the same shapes. Then all that is converted are the
numbers that were measured.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gradtrace.capture.measures import NOTHING, Kind, Measure
from gradtrace.trace.arrow import array_of, batch_of_columns, repeated

if TYPE_CHECKING:
    from gradtrace.capture.rows import Rows

_MOST_OUTLINES = 4
"""The parts in which a step is written (two optimizers, an evaluation now and then) look different."""
_MOST_ROWS = 20_000
"""Of more rows, such as those of a long evaluation, no outline is kept."""

_counts_of = operator.attrgetter("counts")
_kind = operator.attrgetter("kind")
_owner = operator.attrgetter("owner")
_NUMBERS = [(name, operator.attrgetter(name)) for name in ("min", "max", "norm")]


class _Outline:
    """All of a batch but the numbers, the time and the place in the run: rows that look the same share it."""

    def __init__(self, rank: int, rows: Rows, kinds: list[Kind | None]) -> None:
        self._sites, self._micro_steps, self._calls, self._kinds = rows.sites, rows.micro_steps, rows.calls, kinds
        self._owners = [owner for owner in dict.fromkeys(map(_owner, rows.sites)) if owner is not None]
        self._names = [owner.name for owner in self._owners]
        self.arrays = self._arrays(rank)

    def fits(self, rows: Rows, kinds: list[Kind | None]) -> bool:
        """Whether these rows look the same; a module's name may have become another one since."""
        return (
            rows.sites == self._sites
            and kinds == self._kinds
            and rows.calls == self._calls
            and rows.micro_steps == self._micro_steps
            and [owner.name for owner in self._owners] == self._names
        )

    def _arrays(self, rank: int) -> dict[str, pa.Array[Any]]:
        names: dict[Any, str | None] = dict(zip(self._owners, self._names, strict=True))
        sources = [site.source or (None, None, None) for site in self._sites]
        texts = [(None, None, None) if kind is None else kind.texts for kind in self._kinds]
        columns: dict[str, list[Any]] = {
            "rank": [rank] * len(self._sites),
            "micro_step": list(self._micro_steps),
            "phase": [site.phase for site in self._sites],
            "module": [names.get(site.owner) for site in self._sites],
            "call": list(self._calls),
            "tensor": [site.tensor for site in self._sites],
            "path": [site.path for site in self._sites],
            "dtype": [text[0] for text in texts],
            "shape": [text[1] for text in texts],
            "device": [text[2] for text in texts],
            "numel": [None if kind is None else kind.numel for kind in self._kinds],
            "nan_count": (zeros := [None if kind is None else 0 for kind in self._kinds]),
            "posinf_count": zeros,
            "neginf_count": zeros,
            "op": [None if op is None else str(op) for op, _, _ in sources],
            "file": [file for _, file, _ in sources],
            "line": [line for _, _, line in sources],
            "detail": [
                kind.remark if site.detail is None and kind is not None else site.detail
                for site, kind in zip(self._sites, self._kinds, strict=True)
            ],
        }
        return {name: array_of(name, values) for name, values in columns.items()}


class Columns:
    """Makes the batches of one process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outlines: list[_Outline] = []

    def batch(self, rows: Rows, step: int, time: datetime) -> pa.RecordBatch:
        """Return rows as one Arrow batch of step ``step``, which ended at ``time``."""
        measures = rows.measures
        outline = self._outline(rows, list(map(_kind, measures)))
        numbers = {name: array_of(name, list(map(get, measures))) for name, get in _NUMBERS}
        place = {
            "step": repeated("step", step, len(rows)),
            "seq": array_of("seq", rows.seqs),
            "time": repeated("time", time, len(rows)),
        }
        return batch_of_columns({**outline.arrays, **place, **numbers, **_counts(measures)})

    def _outline(self, rows: Rows, kinds: list[Kind | None]) -> _Outline:
        for index, outline in enumerate(self._outlines):
            if outline.fits(rows, kinds):
                self._outlines.insert(0, self._outlines.pop(index))
                return outline
        outline = _Outline(self._rank, rows, kinds)
        if len(rows) <= _MOST_ROWS:
            self._outlines = [outline, *self._outlines[: _MOST_OUTLINES - 1]]
        return outline


def _counts(measures: Sequence[Measure]) -> dict[str, pa.Array[Any]]:
    """Return the columns of counts, if anything is not finite."""
    found = list(map(_counts_of, measures))
    if found.count(None) == len(found):
        return {}
    none = (0, 0, 0)
    counts = [(None, None, None) if m is NOTHING else m.counts or none for m in measures]
    columns = zip(*counts, strict=True)
    names = ("nan_count", "posinf_count", "neginf_count")
    return {name: array_of(name, list(column)) for name, column in zip(names, columns, strict=True)}
