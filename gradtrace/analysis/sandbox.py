"""Queries that other people wrote: answered, but with no way to reach a file, the network or the recording.

DuckDB 2 can write files from a place that parses as SELECT (``WITH x AS (COPY ... TO ...) SELECT ...``), and
whatever path it may read it may also write. So the sandbox gives it no path at all: the data comes in through
Arrow, and statement types are checked only to say clearly what is not allowed. No path means no directory for what
does not fit into memory either: DuckDB lets queries read and write there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import duckdb

from gradtrace.analysis.limits import Allowance
from gradtrace.analysis.tabular import SHOWN, Tabular, require_pandas
from gradtrace.errors import NotARunError, QueryError

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self

_ROWS_AT_ONCE = 10_000
_READING = {"select", "from", "with", "values", "table", "pivot", "pivot_wider", "pivot_longer", "unpivot"}
_TELLING = {"describe", "desc", "show", "summarize", "explain"}
_LONGEST = 1_000_000
"""Most characters of a query: DuckDB takes some kilobytes for each before any limit of its memory holds."""

ALONE: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
"""Settings of every connection: DuckDB 1 fetches extensions from the network, even with no external access."""

_SHUT = ALONE | {"temp_directory": "", "allow_persistent_secrets": False, "allow_community_extensions": False}

_LOCKS = (
    "SET python_enable_replacements = false",  # no Python variable of ours is a table
    "SET enable_external_access = false",
    "SET disabled_filesystems = 'LocalFileSystem'",  # a second wall; DuckDB 1 logs to files in spite of the first
    "SET lock_configuration = true",
)
_KIND = re.compile(r"^[A-Za-z ]+? Error: ")
_DAMAGE = re.compile(r"'parquet_rows' failed: ([^\n]+)")
_FIRST_WORD = re.compile(r"(?:[\s(]|--[^\n]*(?:\n|$)|/\*.*?\*/)*(\w*).*", re.DOTALL)


def open_connection() -> duckdb.DuckDBPyConnection:
    """Return an empty connection, to be filled and then locked."""
    return duckdb.connect(config=_SHUT)


def lock(connection: duckdb.DuckDBPyConnection, memory: int) -> None:
    """Take away all access to files and settings, and all memory above some bytes, for good."""
    silence(connection)
    for statement in (f"SET memory_limit = '{memory} bytes'", *_LOCKS):
        connection.execute(statement)


def silence(connection: duckdb.DuckDBPyConnection) -> None:
    """Have DuckDB show no progress: in a notebook or a REPL it would, unasked."""
    with suppress(duckdb.InvalidInputException):  # of a notebook without ipywidgets, which can show none
        connection.execute("SET enable_progress_bar = false")


class Result(Tabular):
    """The answer to a query: iterate over it to stream the rows, or take all of them at once.

    Showing it fetches no more rows than are shown.
    """

    def __init__(
        self,
        connect: Callable[[], duckdb.DuckDBPyConnection],
        query: str,
        *,
        timeout: float | None = None,
        memory: int | None = None,
    ) -> None:
        """Run the query on a connection of its own, which ``connect`` opens and fills, and which is locked here.

        ``timeout`` is in seconds, ``memory`` in bytes; see ``Allowance``.

        Raises:
            QueryError: it is no query, or more than one, or DuckDB refuses it.
            QueryLimitError: it takes more time or memory.
        """
        self._connect = connect
        self._query = query
        self._limits = (timeout, memory)
        self._rows: list[tuple[Any, ...]] | None = None
        self._first: list[tuple[Any, ...]] | None = None
        self._asked: _Asked | None = self._ask()
        self._columns = [column[0] for column in self._asked.connection.description or ()]

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
        with self._take() as asked:
            while rows := asked.fetch():
                yield from rows

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table, of the types that DuckDB gives them.

        Raises:
            QueryError: the query fails on the way.
        """
        with self._open() as asked, asked.working():
            table: pa.Table = asked.connection.sql(self._query).to_arrow_table()
            return table

    def df(self) -> Any:
        """Return the rows as a pandas DataFrame, of the types that DuckDB gives them.

        Raises:
            MissingPackageError: pandas is not installed.
            QueryError: the query fails on the way.
        """
        require_pandas()
        with self._take() as asked, asked.working():
            return asked.connection.df()

    def _head(self) -> tuple[list[Sequence[Any]], str]:
        if self._rows is None and self._first is None:
            with closing(iter(self)) as rows:
                self._first = list(islice(rows, SHOWN + 1))
            if len(self._first) <= SHOWN:
                self._rows = self._first
        if self._rows is not None:
            return super()._head()
        return list((self._first or [])[:SHOWN]), "more rows"

    def _take(self) -> _Asked:
        """Return the connection whose rows are still to be fetched, for the caller to close."""
        asked, self._asked = self._asked or self._ask(), None
        return asked

    def _ask(self) -> _Asked:
        asked = self._open()
        try:
            with asked.working():
                _check(asked.connection.extract_statements(self._query), self._query)
                asked.connection.execute(self._query)
        except QueryError:
            asked.connection.close()
            raise
        return asked

    def _open(self) -> _Asked:
        _check_text(self._query)
        asked = _Asked(self._connect(), Allowance(*self._limits))
        try:
            with asked.working():
                lock(asked.connection, asked.allowance.memory)
        except QueryError:
            asked.connection.close()
            raise
        return asked


@dataclass(frozen=True)
class _Asked:
    """A connection to which a query is put, and what this may take; as a context manager it is closed at the end."""

    connection: duckdb.DuckDBPyConnection
    allowance: Allowance

    @contextmanager
    def working(self) -> Iterator[None]:
        """Stand around all that DuckDB does."""
        with query_errors(), self.allowance.spend(self.connection):
            yield

    def fetch(self) -> list[tuple[Any, ...]]:
        """Return some more rows, none after the last."""
        with self.working():
            return self.connection.fetchmany(_ROWS_AT_ONCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()


def _check_text(query: str) -> None:
    if len(query) > _LONGEST:
        raise QueryError(f"a query has at most {_LONGEST:,} characters; this has {len(query):,}")
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise QueryError(f"the query is not text: what stands at character {error.start} is none") from None


def _check(statements: Sequence[duckdb.Statement], query: str) -> None:
    if len(statements) != 1:
        raise QueryError(f"one query at a time, please: this is {len(statements) or 'none'}")
    word = _FIRST_WORD.sub(r"\1", query)
    if word.lower() not in _READING | _TELLING:
        raise QueryError(f"only queries are allowed{word and f', not {word.upper()}'}")


@contextmanager
def query_errors() -> Iterator[None]:
    """Turn what DuckDB raises into a ``QueryError`` with its text, or a ``NotARunError`` where the file is to blame."""
    try:
        yield
    except RuntimeError as error:
        if str(error) == "Query interrupted":  # what it makes of Ctrl-C
            raise KeyboardInterrupt from None
        raise QueryError(str(error)) from None
    except duckdb.Error as error:
        if damage := _DAMAGE.search(str(error)):
            raise NotARunError(f"the recording is damaged: {damage[1]}") from None
        raise QueryError(_KIND.sub("", str(error))) from None
    except (ArithmeticError, ValueError) as error:
        raise QueryError(f"a value does not fit into Python: {error}; cast it to VARCHAR") from None
