"""What a watched step would have left of one that was captured in full. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtrace.capture.rows import Row
from gradtrace.capture.statistics import Measure
from gradtrace.trace.thinning import WATCHED

_Pass = tuple[int, str | None]


def as_watched(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a watched step: in place of the gradients of a pass there is their norm, at the last one."""
    squares: dict[_Pass, float] = {}
    last: dict[_Pass, int] = {}
    for index, row in enumerate(rows):
        if _is_gradient(row) and row.measure is not None:
            square = (row.measure.norm or 0.0) ** 2 if row.measure.finite else math.nan
            squares[_pass(row)] = squares.get(_pass(row), 0.0) + square
            last[_pass(row)] = index
    kept: list[Row] = []
    for index, row in enumerate(rows):
        if row.measure is None or row.tensor in WATCHED or row.pending or not row.measure.finite:
            kept.append(row)
        if _is_gradient(row) and last.get(_pass(row)) == index:
            norm = Measure.of_number(math.sqrt(squares[_pass(row)]))
            kept.append(row._replace(owner=None, call=None, tensor="grad_norm", path="", measure=norm))
    return kept


def _is_gradient(row: Row) -> bool:
    return row.tensor == "grad" and row.phase == "backward"


def _pass(row: Row) -> _Pass:
    return row.micro_step, row.detail
