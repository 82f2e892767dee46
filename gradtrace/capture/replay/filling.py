"""Puts what a replay has seen into a step that was only watched, as if the step had been captured in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradtrace.capture.replay.rerun import Rerun
from gradtrace.capture.rows import Row, RowBuffer


def fill_in(rows: RowBuffer, seen: Sequence[Rerun], *, is_reduced: bool) -> None:
    """Give the calls that were run again the rows that they would have left.

    The rows of a call that belongs to a step that has been written already stay away. ``is_reduced``: gradients were
    added up over ranks, so one that only the step itself has seen non-finite came in from another rank.
    """
    shift = 0
    for run in sorted(seen, key=lambda run: run.kept.rows_from):
        kept = run.kept
        if kept.rows is not None:
            continue
        forward = [_with_phase(run, row) for row in run.forward]
        start, end = kept.rows_from + shift, kept.rows_to + shift
        rows.replace(start, end, forward)
        kept.rows_from, kept.rows_to = start, start + len(forward)
        shift += len(forward) - (end - start)
    backward = [row for run in seen for row in run.backward]
    if backward:
        start = min(run.kept.backward_from for run in seen if run.backward) + shift
        after = rows.between(start)
        rows.replace(start, start + len(after), [*backward, *_left_over(after, backward, is_reduced)])


def _with_phase(run: Rerun, row: Row) -> Row:
    """Return a row of the forward; an argument that was computed is no part of the batch."""
    is_argument = row.owner is run.kept.entry and row.tensor == "input" and row.phase == "input"
    return row._replace(phase="forward") if is_argument and row.path in run.kept.computed else row


def _left_over(after: Iterable[Row], backward: Sequence[Row], is_reduced: bool) -> list[Row]:
    """Return the rows that the step has left since the pass began, without gradients that the replay has seen bad."""
    found = {(row.owner, row.path): row.measure for row in backward if row.tensor == "grad"}
    rest = []
    for row in after:
        measure = found.get((row.owner, row.path)) if row.tensor == "grad" else None
        if measure is None or (measure.finite and not is_reduced):
            rest.append(row)
        elif measure.finite:
            rest.append(row._replace(phase="optimizer"))
    return rest
