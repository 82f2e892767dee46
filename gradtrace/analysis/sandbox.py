"""Queries that other people wrote: answered, but with no way to reach a file, the network or the recording.

DuckDB 2 can write files from a place that parses as SELECT (``WITH x AS (COPY ... TO ...) SELECT ...``), and
whatever path it may read it may also write. So the sandbox gives it no path at all: the data comes in through
Arrow, and statement types are checked only to say clearly what is not allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import duckdb

from gradtrace.analysis.tabular import SHOWN, Tabular, require_pandas
from gradtrace.errors import QueryError

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 10_000
_READING = {"select", "from", "with", "values", "table", "pivot", "pivot_wider", "pivot_longer", "unpivot"}
_TELLING = {"describe", "desc", "show", "summarize", "explain"}
_LOCKS = (
    "SET python_enable_replacements = false",  # no Python variable of ours is a table
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
_KIND = re.compile(r"^[A-Za-z ]+? Error: ")
_FIRST_WORD = re.compile(r"(?:[\s(]|--[^\n]*(?:\n|$)|/\*.*?\*/)*(\w*).*", re.DOTALL)


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Take away all access to files and settings, for good."""
    for statement in _LOCKS:
        connection.execute(statement)


class Result(Tabular):
    """The answer to a query: iterate over it to stream the rows, or take all of them at once.

    Showing it fetches no more rows than are shown.
    """

    def __init__(self, connect: Callable[[], duckdb.DuckDBPyConnection], query: str) -> None:
        """Run the query on a connection of its own, which ``connect`` makes and ``lock`` has shut.

        Raises:
            QueryError: it is no query, or more than one, or DuckDB refuses it.
        """
        self._connect = connect
        self._query = query
        self._rows: list[tuple[Any, ...]] | None = None
        self._first: list[tuple[Any, ...]] | None = None
        self._running: duckdb.DuckDBPyConnection | None = self._run()
        self._columns = [column[0] for column in self._running.description or ()]

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return self._columns

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """All rows, as tuples of Python values."""
        if self._rows is None:
            self._rows = list(self)
        return self._rows

    def __iter__(self) -> Generator[tuple[Any, ...], None, None]:
        """Yield the rows one by one without keeping them.

        Raises:
            QueryError: the query fails on the way.
        """
        if self._rows is not None:
            yield from self._rows
            return
        with self._take() as running, query_errors():
            while rows := running.fetchmany(_ROWS_AT_ONCE):
                yield from rows

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table, of the types that DuckDB gives them.

        Raises:
            QueryError: the query fails on the way.
        """
        with self._connect() as connection, query_errors():
            table: pa.Table = connection.sql(self._query).to_arrow_table()
            return table

    def df(self) -> Any:
        """Return the rows as a pandas DataFrame, of the types that DuckDB gives them.

        Raises:
            MissingPackageError: pandas is not installed.
            QueryError: the query fails on the way.
        """
        require_pandas()
        with self._take() as running, query_errors():
            return running.df()

    def _head(self) -> tuple[list[Sequence[Any]], str]:
        if self._rows is None and self._first is None:
            with closing(iter(self)) as rows:
                self._first = list(islice(rows, SHOWN + 1))
            if len(self._first) <= SHOWN:
                self._rows = self._first
        if self._rows is not None:
            return super()._head()
        return list((self._first or [])[:SHOWN]), "more rows"

    def _take(self) -> duckdb.DuckDBPyConnection:
        """Return the connection whose rows are still to be fetched, for the caller to close."""
        running, self._running = self._running or self._run(), None
        return running

    def _run(self) -> duckdb.DuckDBPyConnection:
        connection = self._connect()
        try:
            with query_errors():
                _check(connection.extract_statements(self._query), self._query)
                return connection.execute(self._query)
        except QueryError:
            connection.close()
            raise


def _check(statements: Sequence[duckdb.Statement], query: str) -> None:
    if len(statements) != 1:
        raise QueryError(f"one query at a time, please: this is {len(statements) or 'none'}")
    word = _FIRST_WORD.sub(r"\1", query)
    if word.lower() not in _READING | _TELLING:
        raise QueryError(f"only queries are allowed, not {word.upper()}")


@contextmanager
def query_errors() -> Iterator[None]:
    """Turn an error of DuckDB's into a ``QueryError`` with its text."""
    try:
        yield
    except duckdb.Error as error:
        raise QueryError(_KIND.sub("", str(error))) from None
