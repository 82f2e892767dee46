"""What the whole run did, column by column: loss, gradient norm, learning rate, loss scale, and its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtrace.analysis.report.grid import Grid, Selection

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

SCALARS = ("loss", "grad_norm", "lr", "loss_scale")

# Of several values in a step the last one counts, of several learning rates the first group's. Watched steps have the
# norm of their gradients in a row of its own; the others have it from the last gradient of each parameter.
_OF_STEPS = """
SELECT
    tensor AS name, rank, step,
    CASE WHEN tensor = 'lr' THEN arg_min(value, seq) ELSE arg_max(value, seq) END AS value
FROM (
    SELECT tensor, rank, step, seq, scalar_value(nan_count, posinf_count, neginf_count, "max") AS value
    FROM records
    WHERE tensor IN {scalars} AND {condition}
)
GROUP BY tensor, rank, step
UNION ALL
SELECT 'grad_norm', rank, step, sqrt(sum(norm * norm))
FROM (
    SELECT rank, step, {norm} AS norm
    FROM records
    WHERE tensor = 'grad' AND {condition}
    {last}
)
GROUP BY rank, step
"""
_NORM = "scalar_value(nan_count, posinf_count + neginf_count, 0, norm)"
_LAST_OF_SEVERAL = "GROUP BY rank, step, module, path"

_COURSE = """
SELECT
    name, {column} AS column_number,
    min(value) FILTER (WHERE isfinite(value)),
    max(value) FILTER (WHERE isfinite(value)),
    arg_max(value, step) FILTER (WHERE isfinite(value)),
    count(*) FILTER (WHERE NOT isfinite(value)),
    min(step) FILTER (WHERE NOT isfinite(value))
FROM ({of_steps})
WHERE value IS NOT NULL
GROUP BY ALL
ORDER BY name, column_number
"""

_HAS_SEVERAL_PASSES = """
SELECT max(micro_step) > 0 OR (
    SELECT max(losses) FROM (SELECT count(*) AS losses FROM records WHERE tensor = 'loss' GROUP BY rank, step)
) > 1
FROM records
"""

# The replay is part of its incident and speaks in JSON.
_EVENTS = """
SELECT
    event, {column} AS column_number, count(*), min(step), max(step), arg_min(rank, (step, seq)),
    arg_min(detail, (step, seq))
FROM (SELECT *, NULL AS op FROM events)
WHERE event <> 'replay' AND {condition}
GROUP BY ALL
ORDER BY column_number, event
"""


@dataclass
class Course:
    """One value over the columns: its smallest, largest and last finite ones, None where there is none.

    ``bad`` maps a column to the number of its values that are not finite, and the first step that has one.
    """

    low: list[float | None]
    high: list[float | None]
    last: list[float | None]
    bad: dict[int, tuple[int, int]]


@dataclass
class Event:
    """The events of one kind in one column; ``detail`` is what the first of them says."""

    name: str
    column: int
    count: int
    first_step: int
    last_step: int
    rank: int
    detail: str | None


def courses(run: Recording, selection: Selection, grid: Grid) -> dict[str, Course]:
    """Return the courses that the run has, in the order of ``SCALARS``."""
    several = run.execute(_HAS_SEVERAL_PASSES).fetchall()[0][0]
    of_steps = _OF_STEPS.format(
        scalars=SCALARS,
        condition=selection.condition,
        norm=f"arg_max({_NORM}, seq)" if several else _NORM,
        last=_LAST_OF_SEVERAL if several else "",
    )
    found: dict[str, Course] = {}
    query = _COURSE.format(column=grid.column, of_steps=of_steps)
    for name, column, low, high, last, bad, first_bad in run.execute(query).fetchall():
        course = found.setdefault(name, _nothing(grid))
        course.low[column], course.high[column], course.last[column] = low, high, last
        if bad:
            course.bad[column] = (bad, first_bad)
    return {name: found[name] for name in SCALARS if name in found}


def events(run: Recording, selection: Selection, grid: Grid) -> list[Event]:
    """Return the events in the order of the columns, those of one kind and column together."""
    query = _EVENTS.format(column=grid.column, condition=selection.condition)
    return [Event(*row) for row in run.execute(query).fetchall()]


def _nothing(grid: Grid) -> Course:
    def blank() -> list[float | None]:
        return [None] * grid.count

    return Course(blank(), blank(), blank(), {})
