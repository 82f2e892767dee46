"""The modules of the page: a tree in model order, and what its table says of each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtrace.analysis.report.grid import Selection
from gradtrace.analysis.scene import nearest_above

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

# Those that only the records know come last.
_MODULES = """
SELECT module, type, parameters, calls
FROM (
    SELECT module, number, type, parameters, calls FROM modules {shown}
    UNION ALL
    SELECT DISTINCT module, NULL, '', 0, 0 FROM report_cells ANTI JOIN modules USING (module)
)
ORDER BY number NULLS LAST, module
"""

_SHOWN = "SEMI JOIN report_places ON modules.module = report_places.shown"

_MEASURED = """
SELECT
    module,
    max(greatest(abs("min"), abs("max"))) FILTER (WHERE tensor = 'output'),
    max(greatest(abs("min"), abs("max"))) FILTER (WHERE tensor = 'grad'),
    max(greatest(abs("min"), abs("max"))) FILTER (WHERE tensor = 'param'),
    sum(nan_records)::BIGINT,
    sum(inf_records)::BIGINT
FROM report_cells
GROUP BY module
"""

_LAST_GRAD_NORMS = """
SELECT module, max(norm)
FROM (
    SELECT rank, shown AS module, sqrt(sum(norm * norm)) AS norm
    FROM (
        SELECT rank, {module} AS shown, module, path, arg_max(norm, seq) AS norm
        FROM {records}
        WHERE tensor = 'grad' AND nan_count + posinf_count + neginf_count = 0 AND {condition}
        GROUP BY rank, shown, module, path
    )
    GROUP BY rank, shown
)
WHERE module IS NOT NULL
GROUP BY module
"""


@dataclass
class Module:
    """One module. ``parent`` is the place of the one it lies in, None for a root.

    ``grad_norm`` is made from the last finite gradient of each of its parameters; ``nan`` and ``inf`` count records.
    """

    name: str
    type: str
    parent: int | None
    parameters: int
    calls: int
    grad_norm: float | None = None
    max_output: float | None = None
    max_grad: float | None = None
    max_param: float | None = None
    nan: int = 0
    inf: int = 0


def modules(run: Recording, selection: Selection) -> list[Module]:
    """Return the modules in model order, each after the one it lies in. ``report_cells`` has to be there."""
    rows = run.execute(_MODULES.format(shown=_SHOWN if selection.folded else "")).fetchall()
    names = parents_first([row[0] for row in rows])
    facts = {name: (kind, parameters, calls) for name, kind, parameters, calls in rows}
    parents = parents_of(names)
    found = {name: Module(name, facts[name][0], parents[name], *facts[name][1:]) for name in names}
    for name, output, grad, param, nan, inf in run.execute(_MEASURED).fetchall():
        module = found[name]
        module.max_output, module.max_grad, module.max_param, module.nan, module.inf = output, grad, param, nan, inf
    for name, norm in run.execute(
        _LAST_GRAD_NORMS.format(condition=selection.condition, **selection.places)
    ).fetchall():
        found[name].grad_norm = norm
    return list(found.values())


def parents_of(names: list[str]) -> dict[str, int | None]:
    """Return for each name the place of the nearest module around it; modules that the list lacks are passed over."""
    places = {name: place for place, name in enumerate(names)}
    above = {name: nearest_above(name, places) for name in names}
    return {name: None if outer is None else places[outer] for name, outer in above.items()}


def parents_first(names: list[str]) -> list[str]:
    """Return the names so that what lies in a module follows it, in the given order otherwise."""
    children: dict[int | None, list[str]] = {}
    parents = parents_of(names)
    for name in names:
        children.setdefault(parents[name], []).append(name)
    places = {name: place for place, name in enumerate(names)}
    ordered: list[str] = []
    waiting = list(reversed(children.get(None, [])))
    while waiting:
        name = waiting.pop()
        ordered.append(name)
        waiting += reversed(children.get(places[name], []))
    return ordered
