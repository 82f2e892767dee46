"""One run as one HTML page, with its data, its styles, its scripts and plotly.js inside it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

from gradtrace.analysis.report import markup
from gradtrace.analysis.report.cells import Planes, count_cells, grid_with_room, planes
from gradtrace.analysis.report.course import Course, Event, courses, events
from gradtrace.analysis.report.folding import fold
from gradtrace.analysis.report.grid import Grid, Selection
from gradtrace.analysis.report.modules import Module, modules
from gradtrace.analysis.report.path import failure_path
from gradtrace.analysis.verdict import first_nan
from gradtrace.analysis.verdict_text import notes as verdict_notes
from gradtrace.errors import MissingPackageError
from gradtrace.printable import html_words

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording
    from gradtrace.analysis.verdict_model import Verdict

GENERATOR = "gradtrace report"
"""What the page says of what made it, near its start."""

_SCRIPTS = ("planes.js", "tree.js", "charts.js", "course.js", "heatmap.js", "lines.js", "table.js", "main.js")


@dataclasses.dataclass
class Contents:
    """All that the page shows. ``notes`` says in words what the page or the recording lacks."""

    verdict: Verdict
    grid: Grid
    modules: list[Module]
    tensors: dict[str, Planes]
    courses: dict[str, Course]
    events: list[Event]
    notes: list[str]


def plotly_script() -> str:
    """Return plotly.js.

    Raises:
        MissingPackageError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingPackageError("a report needs plotly: pip install 'gradtrace[report]'") from None
    script: str = get_plotlyjs()
    return script


def collect(run: Recording, selection: Selection, progress: Callable[[float], None]) -> Contents:
    """Ask the run for all that the page shows; ``progress`` is told the share that is done.

    Raises:
        NoMatchError: the run has no such step or rank.
    """
    verdict = first_nan(run, steps=selection.bounds, rank=selection.rank)
    progress(0.1)
    folded = fold(run, verdict.finding.row.module if verdict.finding else None)
    selection = dataclasses.replace(selection, folded=folded > 0)
    grid = count_cells(run, selection, grid_with_room(run, selection), lambda share: progress(0.1 + 0.6 * share))
    listed = modules(run, selection)
    tensors = planes(run, grid, {module.name: place for place, module in enumerate(listed)})
    progress(0.8)
    found = Contents(verdict, grid, listed, tensors, courses(run, selection, grid), events(run, selection, grid), [])
    run.execute("DROP TABLE report_cells; DROP TABLE report_places")
    found.notes = [*verdict_notes(verdict), *_drawing_notes(run, selection, grid), *_folding_notes(folded, listed)]
    progress(0.9)
    return found


def render(run: Recording, found: Contents, plotly: str, title: str | None = None) -> str:
    """Return the page as HTML."""
    assets = resources.files("gradtrace.analysis.report") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    path = failure_path(run, found.verdict)
    page = Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        generator=GENERATOR,
        policy=_policy(plotly, script),
        title=html_words(title or markup.name_of(run)),
        style=(assets / "style.css").read_text(encoding="utf-8"),
        facts=markup.facts(run),
        notes=markup.notes(found.notes),
        verdict=markup.verdict(found.verdict, path),
        data=data_text(_data(run, found)),
        plotly=plotly,
        script=script,
    )
    return page.encode(errors="replace").decode()  # file names on a command line need not be Unicode


def data_text(data: Any) -> str:
    """Return data as JSON that no HTML parser takes for a tag."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _policy(*scripts: str) -> str:
    """Allow the scripts of the page and nothing else: no other script runs, nothing is fetched."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _data(run: Recording, found: Contents) -> dict[str, Any]:
    grid, row = found.grid, found.verdict.finding.row if found.verdict.finding else None
    places = {module.name: place for place, module in enumerate(found.modules)}
    failure = None
    if row is not None and grid.first <= row.step <= grid.last:
        place = None if row.module is None else places.get(row.module)
        failure = {"module": place, "tensor": row.tensor, "step": row.step}
    columns = {
        field.name: [_number(getattr(module, field.name)) for module in found.modules]
        for field in dataclasses.fields(Module)
    }
    return {
        "grid": dataclasses.asdict(grid) | {"count": grid.count},
        "ranks": len(run.infos),
        "modules": columns,
        "tensors": {name: dataclasses.asdict(tensor) for name, tensor in found.tensors.items()},
        "courses": {name: dataclasses.asdict(course) for name, course in found.courses.items()},
        "events": [dataclasses.asdict(event) for event in found.events],
        "failure": failure,
    }


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _folding_notes(folded: int, listed: list[Module]) -> list[str]:
    if not folded:
        return []
    return [
        f"{folded + len(listed):,} modules are too many for a page: {len(listed):,} are shown, the others "
        "count as part of the nearest one above them that is"
    ]


def _drawing_notes(run: Recording, selection: Selection, grid: Grid) -> list[str]:
    """Say what is drawn where it is not all that there is."""
    said = []
    if grid.width > 1 and grid.steps > grid.count:
        said.append(
            f"{grid.steps:,} steps drawn as {grid.count:,} columns of {grid.width:,}: "
            "the extremes of each and every NaN and Inf are kept"
        )
    first, end = selection.bounds
    if first is not None or end is not None:
        said.append(f"only steps {'' if first is None else first}:{'' if end is None else end} are shown")
    if selection.rank is not None:
        said.append(f"only rank {selection.rank} of {len(run.infos)} is shown")
    elif len(run.infos) > 1:
        said.append(f"each number is the most extreme of {len(run.infos)} ranks; --rank N shows one alone")
    return said
