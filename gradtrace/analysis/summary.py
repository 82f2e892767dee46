"""What a run looks like, a line a module, a type of modules, or a step: norms over time, extremes, counts.

SQL does the counting, so that ten million rows are a matter of a second; Python only puts lines together.
"""

from __future__ import annotations

import math

from gradtrace.analysis.labels import names_above
from gradtrace.analysis.recording import Recording, answers
from gradtrace.analysis.summary_model import COLUMNS, By, Course, ModuleLine, StepLine, Summary
from gradtrace.analysis.tabular import counted
from gradtrace.errors import NoMatchError

POINTS = 16
"""Most points of a series; each stands for an equal stretch of steps."""

# The stretch a row belongs to: $first is the first step, $span the number of steps from there to the last.
_STRETCH = "((step - $first) * $points // $span)::INTEGER"

_STATISTICS = f"""
SELECT
    module,
    tensor,
    {_STRETCH} AS stretch,
    count(*),
    count(*) FILTER (WHERE nan_count > 0),
    count(*) FILTER (WHERE posinf_count > 0 OR neginf_count > 0),
    greatest(abs(min("min")), abs(max("max"))),
    max(norm)
FROM records
WHERE module IS NOT NULL AND phase <> 'event' AND op IS NULL
GROUP BY ALL
"""

# The gradient that counts is the last one of a step; a step of several passes has one for each.
_LAST_GRADS = """(
    SELECT
        rank, step, module, path, max(seq) AS seq, arg_max(norm, seq) AS norm, arg_max(nan_count, seq) AS nan_count,
        arg_max(posinf_count, seq) AS posinf_count, arg_max(neginf_count, seq) AS neginf_count
    FROM grads
    GROUP BY ALL
)"""
_HAS_SEVERAL_PASSES = """
SELECT (SELECT max(micro_step) FROM records) > 0
    OR (SELECT max(losses) FROM (SELECT count(*) AS losses FROM records WHERE tensor = 'loss' GROUP BY rank, step)) > 1
"""
_GRAD_NORMS = f"""
WITH lines AS (
    SELECT unnest($modules::VARCHAR[]) AS module, unnest($lines::INTEGER[]) AS number
),
of_steps AS (
    SELECT number, rank, step, sqrt(sum(norm * norm)) AS norm
    FROM {{grads}} JOIN lines USING (module)
    GROUP BY ALL
)
SELECT number, {_STRETCH} AS stretch, max(norm), arg_max(norm, step)
FROM of_steps
GROUP BY ALL
ORDER BY stretch
"""

# Watched steps have the norm in a row of its own. A maximum is NaN as soon as one value is.
_COURSE = f"""
WITH of_steps AS (
    SELECT tensor AS name, step, seq, scalar_value(nan_count, posinf_count, neginf_count, "max") AS value
    FROM records
    WHERE tensor IN ('loss', 'grad_norm') AND op IS NULL
    UNION ALL
    SELECT 'grad_norm', step, max(seq), sqrt(sum(norm * norm))
    FROM (
        SELECT rank, step, seq, scalar_value(nan_count, posinf_count + neginf_count, 0, norm) AS norm
        FROM {{grads}}
    )
    GROUP BY rank, step
)
SELECT name, {_STRETCH} AS stretch, max(abs(value)), arg_max(value, seq)
FROM of_steps
GROUP BY ALL
ORDER BY stretch
"""

_MODULES = """
SELECT module, type, depth, parameters, calls
FROM (
    SELECT module, number, type, depth, parameters, calls FROM modules
    UNION ALL
    SELECT DISTINCT module, NULL, '', len(string_split(module, '.')), 0, 0
    FROM records ANTI JOIN modules USING (module)
    WHERE module IS NOT NULL
)
ORDER BY number NULLS LAST, module
"""

_STEPS = """
WITH extremes AS (
    SELECT
        rank,
        step,
        max(greatest(abs("min"), abs("max"))) FILTER (WHERE tensor = 'output') AS max_output,
        max(greatest(abs("min"), abs("max"))) FILTER (WHERE tensor = 'grad') AS max_grad,
        max(greatest(abs("min"), abs("max"))) FILTER (WHERE tensor = 'param') AS max_param,
        count(*) FILTER (WHERE posinf_count > 0 OR neginf_count > 0) AS inf
    FROM records
    WHERE phase <> 'event' AND op IS NULL
    GROUP BY rank, step
)
SELECT
    rank, step, level, records, loss, grad_norm, lr, max_output, max_grad, max_param, nan_records, inf, skipped
FROM steps JOIN extremes USING (rank, step)
ORDER BY step, rank
"""


@answers
def summarize(run: Recording, by: By = "module", depth: int | None = None) -> Summary:
    """Return the summary of a run, a line a module, a type of modules, or a step.

    With ``by="module"`` modules more than ``depth`` levels below their root are folded into the one above them at that
    level.

    Raises:
        NoMatchError: there is no summary of that kind, or none with a depth.
    """
    if by not in COLUMNS:
        raise NoMatchError(f"there is no summary by {by!r}; there are: {', '.join(COLUMNS)}")
    if depth is not None and (by != "module" or depth < 0):
        raise NoMatchError("a depth is a number of levels, from 0, and goes with a summary by module")
    if by == "step":
        return Summary(by, tuple(by_step(run)))
    return Summary(by, tuple(by_type(run) if by == "type" else by_module(run, depth)))


@answers
def facts(run: Recording, captured: int) -> str:
    """Say what there is of a run, ``captured`` of its steps in full: steps, ranks, modules, records, how it ended."""
    words = [
        counted(run.steps, "step"),
        f"{captured:,} captured in full" if captured < run.steps else "",
        f"{len(run.infos)} ranks" if len(run.infos) > 1 else "",
        counted(len(run.info.modules), "module"),
        counted(sum(info.records for info in run.infos), "record"),
        run.end,
    ]
    return ", ".join(filter(None, words))


def by_module(run: Recording, depth: int | None = None) -> list[ModuleLine]:
    """Return a line for each module, in model order.

    Modules more than ``depth`` levels below their root are folded into the one above them at that level.
    """
    modules = _modules(run)
    levels = {name: level for name, _, level, _, _ in modules}
    lines: dict[str, ModuleLine] = {}
    keys = {}
    for name, kind, _, parameters, calls in modules:
        key = keys[name] = _folded(name, levels, depth)
        line = lines.setdefault(key, ModuleLine(key, kind))
        line.parameters += parameters
        if key == name:
            line.type, line.calls = kind, calls
    return _measured(run, lines, keys)


def by_type(run: Recording) -> list[ModuleLine]:
    """Return a line for each type of modules, in the order in which the model has them first."""
    lines: dict[str, ModuleLine] = {}
    keys = {}
    for name, kind, _, parameters, calls in _modules(run):
        keys[name] = kind
        line = lines.setdefault(kind, ModuleLine(kind, kind))
        line.parameters += parameters
        line.calls += calls
    return _measured(run, lines, keys)


@answers
def courses(run: Recording) -> dict[str, Course]:
    """Return the courses of "loss" and "grad_norm" over all steps, those that were only watched among them."""
    stretches = _stretches(run)
    if stretches is None:
        return {}
    found = {name: Course([None] * stretches["points"]) for name in ("loss", "grad_norm")}
    for name, stretch, largest, last in run.execute(_COURSE.format(grads=_grads(run)), stretches).fetchall():
        course = found[name]
        course.points[stretch] = largest
        course.last = course.last if last is None else last
    return found


def by_step(run: Recording) -> list[StepLine]:
    """Return a line for each step, and rank within it."""
    return [StepLine(*row) for row in run.execute(_STEPS).fetchall()]


def _modules(run: Recording) -> list[tuple[str, str, int, int, int]]:
    """Return name, type, level, parameters and calls of each module, also of those only the records know."""
    return run.execute(_MODULES).fetchall()


def _folded(name: str, levels: dict[str, int], depth: int | None) -> str:
    if depth is None:
        return name
    return next((outer for outer in (name, *names_above(name)) if levels.get(outer, depth + 1) <= depth), "")


def _measured(run: Recording, lines: dict[str, ModuleLine], keys: dict[str, str]) -> list[ModuleLine]:
    """Fill in what the records say; ``keys`` gives the line of each module."""
    stretches = _stretches(run)
    if stretches is None:
        return list(lines.values())
    for line in lines.values():
        line.grad_norms = [None] * stretches["points"]
        line.output_norms = [None] * stretches["points"]
    _add_grad_norms(run, lines, keys, stretches)
    for module, *statistics in run.execute(_STATISTICS, stretches).fetchall():
        _add_statistics(lines[keys[module]], *statistics)
    return list(lines.values())


def _stretches(run: Recording) -> dict[str, int] | None:
    """Return what ``_STRETCH`` needs to know, None where nothing was recorded."""
    first, last = run.execute("SELECT min(step), max(step) FROM records").fetchall()[0]
    if first is None:
        return None
    span = last - first + 1
    return {"first": first, "span": span, "points": min(POINTS, span)}


def _grads(run: Recording) -> str:
    """Return where to find the gradients that count; of several passes the last ones, which take twice the time."""
    several = run.execute(_HAS_SEVERAL_PASSES).fetchall()[0][0]
    return _LAST_GRADS if several else "grads"


def _add_grad_norms(
    run: Recording, lines: dict[str, ModuleLine], keys: dict[str, str], stretches: dict[str, int]
) -> None:
    numbers = {key: number for number, key in enumerate(lines)}
    places = {"modules": list(keys), "lines": [numbers[key] for key in keys.values()]}
    found = list(lines.values())
    query = _GRAD_NORMS.format(grads=_grads(run))
    for number, stretch, largest, latest in run.execute(query, places | stretches).fetchall():
        found[number].grad_norms[stretch] = largest
        if latest is not None:
            found[number].grad_norm = latest


def _add_statistics(
    line: ModuleLine,
    tensor: str,
    stretch: int,
    records: int,
    nan: int,
    inf: int,
    extreme: float | None,
    norm: float | None,
) -> None:
    line.records += records
    line.nan += nan
    line.inf += inf
    if tensor == "output":
        line.max_output = _larger(line.max_output, extreme)
        line.output_norms[stretch] = math.nan if nan or inf else _larger(line.output_norms[stretch], norm)
    elif tensor == "grad":
        line.max_grad = _larger(line.max_grad, extreme)
        if nan or inf:
            line.grad_norms[stretch] = math.nan
    elif tensor == "param":
        line.max_param = _larger(line.max_param, extreme)


def _larger(one: float | None, other: float | None) -> float | None:
    """Return the larger one; NaN stays, None is no value."""
    if one is None or other is None:
        return other if one is None else one
    return one if math.isnan(one) else max(one, other)
