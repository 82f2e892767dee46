"""``gradtrace summary``: one line a module, a type of modules, or a step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .format_option import format_option
from .lines import line
from .notes import say_notes
from .output import sparkline, write
from .path import PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtrace.analysis.recording import Recording
    from gradtrace.analysis.summary_model import By

_ROWS = 1_000
_WORDS = ("module", "type", "level")
_FOLD = ", --depth N to fold the deeper ones"
_HEADINGS = {
    "grad_norms": "grad norm",
    "grad_norm": "last",
    "output_norms": "output norm",
    "max_output": "max |output|",
    "max_grad": "max |grad|",
    "max_param": "max |param|",
}


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--by",
    type=click.Choice(["module", "step", "type"]),
    default="module",
    show_default=True,
    metavar="KEY",
    help="What makes a line: module, step or type.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    help="Fold modules deeper than N into those above them.",
)
@click.option("--sort", metavar="COLUMN", help="Sort by COLUMN, largest first. Default: the order of the model.")
@click.option(
    "--rows",
    type=click.IntRange(min=-1),
    default=_ROWS,
    show_default=True,
    metavar="N",
    help="Most rows of a table; -1 for all. Other formats have all rows.",
)
@format_option
def summary(run: str, by: By, depth: int | None, sort: str | None, rows: int, form: str) -> None:
    """Show norms over time, extremes and counts of NaN and Inf, one line a module.

    RUN is a recording: a file, the directory of several ranks, or a glob. The sparklines show the largest
    norm of each stretch of steps on a logarithmic scale; ! marks one with NaN or Inf. The columns nan and
    inf count records that hold such elements.

    \b
    Example:
      $ gradtrace summary run.parquet --depth 2
    """
    from gradtrace.analysis.run import open_run
    from gradtrace.analysis.summary_model import COLUMNS, SERIES

    if depth is not None and by != "module":
        raise click.UsageError("--depth goes with --by module")
    sortable = [column for column in COLUMNS[by] if column not in (*_WORDS, *SERIES)]
    if sort is not None and sort not in sortable:
        raise click.UsageError(f"cannot sort by {sort!r}; there are: {', '.join(sortable)}")

    with open_run(run) as opened:
        found = opened.summary(by, depth)
        columns, lines = found.columns, found.rows
        if sort is not None:
            place = columns.index(sort)
            lines.sort(key=lambda row: _rank(row[place]), reverse=True)
        notes = list(opened.missing)
        if form == "table" and 0 <= rows < len(lines):
            notes.append(
                f"the first {rows:,} of {len(lines):,} rows; pass --rows -1 for all{_FOLD if by == 'module' else ''}"
            )
            del lines[rows:]
        if form == "table":
            for text in _heading(opened):
                line(text)
        _write(form, columns, lines)
        say_notes(notes)


def _rank(value: float | None) -> tuple[bool, bool, float]:
    """Sort key: what was not measured is least, NaN is most."""
    return value is not None, value != value, value or 0.0


def _heading(run: Recording) -> list[str]:
    from gradtrace.analysis.summary import facts

    command, captured = " ".join(run.info.command), run.captured
    lines = [f"{run.path}  {command}".rstrip(), facts(run, captured)]
    if captured < run.steps:  # else the table has it all
        lines += _courses(run)
    return [*lines, ""]


def _courses(run: Recording) -> list[str]:
    """Return a line each for the loss and the gradient norm, over all steps."""
    from gradtrace.analysis.summary import courses

    names = {"loss": "loss", "grad_norm": "grad norm"}
    return [
        f"{names[name]:<10} {sparkline(course.points, sys.stdout)}  last {course.last:.4g}"
        for name, course in courses(run).items()
        if course.last is not None
    ]


def _write(form: str, columns: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
    from gradtrace.analysis.summary_model import cell

    out = sys.stdout
    if form not in ("table", "markdown"):
        write(out, form, columns, rows)
        return
    words = _HEADINGS if "grad_norms" in columns else _HEADINGS | {"grad_norm": "grad norm"}
    headings = [words.get(column, column) for column in columns]
    cells = (
        [cell(column, value, lambda series: sparkline(series, out)) for column, value in zip(columns, row, strict=True)]
        for row in rows
    )
    write(out, form, headings, cells, digits=4)
