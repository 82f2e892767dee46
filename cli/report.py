"""``gradtrace report``: a run as one HTML file."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .lines import put, say
from .notes import say_notes
from .path import PATH
from .progress import progress
from .selection import steps_option

if TYPE_CHECKING:
    from gradtrace.analysis.report.page import Contents


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=PATH)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="PATH",
    help="File to write, - for stdout. An earlier report is replaced. [default: RUN with .html]",
)
@click.option("--force", is_flag=True, help="Overwrite PATH even if it is no report.")
@click.option("--title", metavar="TEXT", help="Title of the page. [default: the name of RUN]")
@steps_option
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only rank N. [default: the extremes of all]")
@click.option("--open", "open_it", is_flag=True, help="Open it in a browser.")
def report(
    run: str,
    output: str | None,
    force: bool,
    title: str | None,
    steps: tuple[int | None, int | None] | None,
    rank: int | None,
    open_it: bool,
) -> None:
    """Write a recording as one HTML file that opens without a network.

    RUN is a recording: a file, the directory of several ranks, or a glob. The page has the verdict, a heatmap of
    modules over steps, the lines of loss, gradient norm, learning rate and of each module, and a table of modules.

    \b
    Example:
      $ gradtrace report run.parquet
      $ gradtrace report run.parquet --steps 900:1000 -o near-nan.html --open
    """
    from gradtrace.analysis.report import report_html
    from gradtrace.analysis.report.page import plotly_script
    from gradtrace.analysis.report.writing import put as put_file
    from gradtrace.analysis.run import open_run

    plotly_script()  # to read a large run takes longer than to find out that it was for nothing
    path = _destination(run, output, force, open_it)
    with open_run(run) as opened, progress("report") as tell:
        page, found = report_html(opened, title=title, steps=steps, rank=rank, progress=tell)
    if path is None:
        put(sys.stdout, page)
    else:
        put_file(page, path)
        say(f"Wrote {path} ({_size(path.stat().st_size)})")
    _say_notes(found)
    if path is not None and open_it:
        webbrowser.open(path.resolve().as_uri())


def _destination(run: str, output: str | None, force: bool, open_it: bool) -> Path | None:
    """Return the file to write, None for stdout."""
    if output == "-":
        if open_it:
            raise click.UsageError("--open needs a file; leave out -o -")
        if sys.stdout.isatty():
            raise click.UsageError("a page is no reading for a terminal: redirect it to a file, or pass -o PATH")
        return None
    path = Path(output) if output is not None else _beside(run)
    if not path.parent.is_dir():
        raise click.UsageError(f"no such directory: {path.parent}")
    if path.is_dir():
        raise click.UsageError(f"{path} is a directory; pass -o with the name of a file")
    if path.exists() and not force and not _is_report(path):
        raise click.ClickException(f"{path} exists and is no report; pass --force to overwrite it, or another -o")
    return path


def _beside(run: str) -> Path:
    path = Path(os.path.normpath(run))
    if path.suffix == ".parts":
        path = path.with_suffix("")
    if any(letter in path.name for letter in "*?["):
        raise click.UsageError("a glob has no name for a report; pass -o PATH")
    return path.with_name(f"{path.stem if path.suffix == '.parquet' else path.name}.html")


def _is_report(path: Path) -> bool:
    from gradtrace.analysis.report.page import GENERATOR

    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(1000)


def _say_notes(found: Contents) -> None:
    say_notes(found.notes)


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
