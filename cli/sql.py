"""``gradtrace sql``: any question to a recording, as a DuckDB query."""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, TextIO

import click

from gradtrace.errors import QueryError, QueryLimitError
from gradtrace.printable import shell_word
from gradtrace.setting_kinds import SIZE, real

from .apart import hard_timeout, limit_growth
from .format_option import format_option
from .notes import say_notes
from .output import write
from .path import PATH
from .reading import reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtrace.analysis.run import Run
    from gradtrace.analysis.sandbox import Result

    from .output import Row

_ROWS = 100
_AT_ONCE = 10_000
_SECONDS = real("SECONDS", lambda number: number > 0, "a number of seconds above 0")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=PATH)
@click.argument("query", required=False)
@click.option(
    "--file",
    "file",
    type=click.File("r", encoding="utf-8"),
    metavar="PATH",
    help="Read the query from PATH, - for stdin.",
)
@click.option(
    "--timeout",
    callback=reading(_SECONDS.read),
    metavar="SECONDS",
    help="End a query that takes longer; by default none is ended.",
)
@click.option(
    "--memory",
    callback=reading(SIZE.read),
    metavar="SIZE",
    help="End a query that needs more memory; by default half of what is free.",
)
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
def sql(
    run: str,
    query: str | None,
    file: TextIO | None,
    timeout: float | None,
    memory: int | None,
    schema: bool,
    form: str,
    rows: int,
) -> None:
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
        _answer(opened, _query(query, file), timeout, memory, form, rows)


def _query(query: str | None, file: TextIO | None) -> str:
    try:
        return file.read() if file is not None else query or ""
    except UnicodeDecodeError as error:
        raise QueryError(f"the query is not UTF-8: {error.reason} at byte {error.start}") from None


def _answer(run: Run, query: str, timeout: float | None, memory: int | None, form: str, rows: int) -> None:
    from gradtrace.analysis.limits import default_memory

    memory = default_memory() if memory is None else memory
    limit_growth(memory)
    try:
        with hard_timeout(timeout):
            result = run.sql(query, timeout=timeout, memory=memory)
        with hard_timeout(timeout):
            _show(result.columns, _in_time(result, timeout), form, rows)
    except QueryLimitError:
        raise
    except MemoryError:
        raise QueryLimitError("the answer does not fit into memory: ask for fewer rows, or see --memory") from None
    except QueryError as error:
        raise QueryError(f"{error}\nsee: gradtrace sql {shell_word(run.path)} --schema") from None
    say_notes(run.missing)


def _in_time(result: Result, timeout: float | None) -> Iterator[Row]:
    """Yield the rows as long as there is time, whoever takes it: the query, or what its rows go to."""
    rows = iter(result)
    end = None if timeout is None else time.monotonic() + timeout
    while some := list(islice(rows, _AT_ONCE)):
        if end is not None and time.monotonic() > end:
            raise QueryLimitError(f"the answer took longer than {timeout:g} s; a larger timeout allows it")
        yield from some


def _show(columns: Sequence[str], answer: Iterator[Row], form: str, limit: int) -> None:
    if form != "table" or limit < 0:
        write(sys.stdout, form, columns, answer)
        return
    rows = list(islice(answer, limit + 1))
    write(sys.stdout, form, columns, rows[:limit])
    if len(rows) > limit:
        say_notes([f"the first {limit} rows; pass --rows -1 for all"])
