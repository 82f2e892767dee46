"""``gradtrace sql``: any question to a recording, as a DuckDB query."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

import click

from gradtrace.errors import QueryError

from .format_option import format_option
from .notes import say_notes
from .output import write
from .path import PATH

if TYPE_CHECKING:
    from gradtrace.analysis.sandbox import Result

_ROWS = 100


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=PATH)
@click.argument("query", required=False)
@click.option("--file", "file", type=click.File("r"), metavar="PATH", help="Read the query from PATH, - for stdin.")
@click.option("--schema", is_flag=True, help="Show the views, their columns and what they mean.")
@format_option
@click.option(
    "--rows",
    type=click.IntRange(min=-1),
    default=_ROWS,
    show_default=True,
    metavar="N",
    help="Most rows of a table; -1 for all. Other formats have all rows.",
)
def sql(run: str, query: str | None, file: TextIO | None, schema: bool, form: str, rows: int) -> None:
    """Ask a recording anything, in DuckDB's SQL.

    RUN is a recording: a file, the directory of several ranks, or a glob. There are the views records,
    params, grads, steps, modules, events and meta. Queries only read, and see nothing but the recording.

    \b
    Example:
      $ gradtrace sql run.parquet "select module, max(norm) from grads group by 1"
      $ gradtrace sql run.parquet --schema
    """
    if schema + (query is not None) + (file is not None) != 1:
        raise click.UsageError("give one of QUERY, --file and --schema")
    from gradtrace.analysis.run import open_run

    with open_run(run) as opened:
        if schema:
            from gradtrace.analysis.catalog import COLUMNS, describe

            write(sys.stdout, form, COLUMNS, describe(opened))
            return
        text = file.read() if file is not None else query or ""
        try:
            _show(opened.sql(text), form, rows)
        except QueryError as error:
            raise QueryError(f"{error}\nsee: gradtrace sql {run} --schema") from None
        say_notes(opened.missing)


def _show(result: Result, form: str, limit: int) -> None:
    if form != "table" or limit < 0:
        write(sys.stdout, form, result.columns, result)
        return
    rows: list[tuple[Any, ...]] = list(islice(result, limit + 1))
    write(sys.stdout, form, result.columns, rows[:limit])
    if len(rows) > limit:
        click.echo(f"gradtrace: note: the first {limit} rows; pass --rows -1 for all", err=True)
