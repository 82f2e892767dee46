"""``gradtrace summary``: one line a module, a type of modules, or a step."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from .output import FORMATS, sparkline, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtrace.analysis.recording import Recording
    from gradtrace.analysis.summary import ModuleLine, StepLine

_MEASURED = (
    "parameters", "calls", "records", "grad_norms", "grad_norm", "output_norms", "max_output", "max_grad",
    "max_param", "nan", "inf",
)  # fmt: skip
_COLUMNS = {
    "module": ("module", "type", *_MEASURED),
    "type": ("type", *_MEASURED),
    "step": (
        "rank", "step", "level", "records", "loss", "grad_norm", "lr", "max_output", "max_grad", "max_param", "nan",
        "inf", "skipped",
    ),
}  # fmt: skip
_SERIES = ("grad_norms", "output_norms")
_NOT_SORTABLE = ("module", "type", "level", *_SERIES)
_HEADINGS = {
    "grad_norms": "grad norm",
    "grad_norm": "last",
    "output_norms": "output norm",
    "max_output": "max |output|",
    "max_grad": "max |grad|",
    "max_param": "max |param|",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
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
    "-f",
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    metavar="NAME",
    help="table, csv, json, jsonl or markdown.",
)
def summary(run: str, by: str, depth: int | None, sort: str | None, form: str) -> None:
    """Show norms over time, extremes and counts of NaN and Inf, one line a module.

    RUN is a recording: a file, the directory of several ranks, or a glob. The sparklines show the largest
    norm of each stretch of steps on a logarithmic scale; ! marks one with NaN or Inf. The columns nan and
    inf count records that hold such elements.

    \b
    Example:
      $ gradtrace summary run.parquet --depth 2
    """
    columns = _COLUMNS[by]
    if depth is not None and by != "module":
        raise click.UsageError("--depth goes with --by module")
    sortable = [column for column in columns if column not in _NOT_SORTABLE]
    if sort is not None and sort not in sortable:
        raise click.UsageError(f"cannot sort by {sort!r}; there are: {', '.join(sortable)}")
    from gradtrace.analysis.run import open_run

    with open_run(run) as opened:
        rows = [_row(line) for line in _lines(opened, by, depth)]
        if sort is not None:
            rows.sort(key=lambda row: _rank(row[sort]), reverse=True)
        if form == "table":
            click.echo(_heading(opened))
        _write(form, columns, rows)
        for note in opened.missing:
            click.echo(f"gradtrace: note: {note}", err=True)


def _lines(run: Recording, by: str, depth: int | None) -> Sequence[ModuleLine | StepLine]:
    from gradtrace.analysis.summary import by_module, by_step, by_type

    if by == "step":
        return by_step(run)
    return by_type(run) if by == "type" else by_module(run, depth)


def _row(line: ModuleLine | StepLine) -> dict[str, Any]:
    row = dataclasses.asdict(line)
    row["module"] = row.get("name")
    return row


def _rank(value: float | None) -> tuple[bool, bool, float]:
    """Sort key: what was not measured is least, NaN is most."""
    return value is not None, value != value, value or 0.0


def _heading(run: Recording) -> str:
    info, captured = run.info, run.captured
    facts = [
        f"{run.steps:,} steps",
        f"{captured:,} captured in full" if captured < run.steps else "",
        f"{len(run.infos)} ranks" if len(run.infos) > 1 else "",
        f"{len(info.modules):,} modules",
        f"{sum(one.records for one in run.infos):,} records",
        run.end,
    ]
    command = " ".join(info.command)
    lines = [f"{run.path}  {command}".rstrip(), ", ".join(filter(None, facts))]
    if captured < run.steps:  # else the table has it all
        lines += _courses(run)
    return "\n".join(lines) + "\n"


def _courses(run: Recording) -> list[str]:
    """Return a line each for the loss and the gradient norm, over all steps."""
    from gradtrace.analysis.summary import courses

    names = {"loss": "loss", "grad_norm": "grad norm"}
    return [
        f"{names[name]:<10} {sparkline(course.points, sys.stdout)}  last {course.last:.4g}"
        for name, course in courses(run).items()
        if course.last is not None
    ]


def _write(form: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    out = sys.stdout
    if form not in ("table", "markdown"):
        write(out, form, columns, ([row[column] for column in columns] for row in rows))
        return

    def cell(column: str, value: Any) -> Any:
        if column in _SERIES:
            return sparkline(value, out)
        return "(root)" if column == "module" and value == "" else value

    words = _HEADINGS if "grad_norms" in columns else _HEADINGS | {"grad_norm": "grad norm"}
    headings = [words.get(column, column) for column in columns]
    write(out, form, headings, ([cell(column, row[column]) for column in columns] for row in rows), digits=4)
