"""``Recording``: a run on disk, opened. Files in (``source.py``), DuckDB views out (``views.sql``).

The library's own queries run on ``Recording.connection``; queries of other people go through ``Recording.sql``,
which answers them where no file can be reached (``sandbox.py``). What is asked of it stands in rooms of its own.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import duckdb

from gradtrace.analysis.ranks import find_sources
from gradtrace.analysis.sandbox import Result
from gradtrace.analysis.soundness import problem_of
from gradtrace.analysis.source import Source
from gradtrace.analysis.views import add_records, add_views, filled_connection, native_connection
from gradtrace.errors import NotARunError, RunClosedError
from gradtrace.trace.parts import parts_of
from gradtrace.trace.runinfo import STOPPED, RunInfo

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R", bound="Recording")
T = TypeVar("T")

# The same as in the view `steps`, which counts much more.
_CAPTURED = """
SELECT count(*) FROM (
    SELECT rank, step FROM records WHERE tensor IN ('input', 'grad_output', 'grad') AND op IS NULL
    EXCEPT
    SELECT rank, step FROM records WHERE tensor = 'grad_norm'
) GROUP BY rank
"""

_OUR_MISTAKES = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException, duckdb.SyntaxException)
"""Queries of gradtrace's own that are wrong; everything else that DuckDB says comes of the file."""


@contextmanager
def reading(*runs: Recording) -> Iterator[None]:
    """Turn an error of DuckDB's that comes of what a recording holds into a ``NotARunError``."""
    try:
        yield
    except _OUR_MISTAKES:
        raise
    except duckdb.Error as error:
        paths = " or ".join(run.path for run in runs)
        raise NotARunError(f"{paths} {problem_of(error, paths)}") from None


def answers(question: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Let a question to a recording raise ``NotARunError`` where it cannot be read."""

    @wraps(question)
    def ask(run: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with reading(run):
            return question(run, *args, **kwargs)

    return ask


class Recording:
    """A recording. Close it, or use it as a context manager.

    ``infos`` holds the facts of each rank, ``info`` those of the first. ``end`` says how the run ended:
    "completed", "running", "killed", or what ``RunInfo.end`` has. ``missing`` says in words what the
    recording does not hold and why; ``damage`` is what of that was recorded and is lost. ``steps`` is the number
    of recorded steps. ``connection`` is a DuckDB connection with the views records, params, grads, steps, modules,
    events and meta.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open what is at ``path``, as ``open_run`` does.

        Raises:
            RunNotFoundError: there is nothing at ``path``.
            NotARunError: what is there is no run that this gradtrace can read.
        """
        self.path = os.fspath(path)
        self._files = ExitStack()
        self._finalizer = weakref.finalize(self, self._files.close)
        self._connection = native_connection()
        self._lock = Lock()
        self._has_views = False
        found = find_sources(self.path, self._files, self._connection)
        sources, self.missing = found.ranks, found.missing
        self.damage: list[str] = list(found.damage)
        self._parquet = [file for source in sources for file in source.parquet]
        self._journals = [table for source in sources for table in source.journals]
        with reading(self):
            add_records(self._connection, self._parquet, self._journals)
            self.infos: list[RunInfo] = [self._settled(source) for source in sources]
        for source, info in zip(sources, self.infos, strict=True):
            damage = list(_damage(source, info))
            self.damage += damage
            self.missing += [*damage, *_missing(source, info)]

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """The connection with all views; they are made when it is first asked for, which ``sql`` never does."""
        with self._lock:
            if not self._has_views:
                add_views(self._connection, self.infos)
                self._has_views = True
        return self._connection

    @property
    def info(self) -> RunInfo:
        """The facts of the first rank."""
        return self.infos[0]

    @property
    def end(self) -> str:
        """How the run ended: of several ranks, the first end that is not "completed"."""
        ends = [info.end for info in self.infos]
        return next((end for end in ends if end != "completed"), "completed")

    @property
    def steps(self) -> int:
        """Number of steps that were recorded; of several ranks, the largest."""
        return max(info.steps for info in self.infos)

    @property
    @answers
    def captured(self) -> int:
        """Number of those steps that were captured in full, not only watched; of several ranks, the largest."""
        if not self.execute("SELECT 1 FROM records WHERE tensor = 'grad_norm' LIMIT 1").fetchall():
            return self.steps
        found = self.execute(_CAPTURED).fetchall()
        return max((count for (count,) in found), default=0)

    def sql(self, query: str, *, timeout: float | None = None, memory: int | None = None) -> Result:
        """Answer one query that only reads, with no access to anything but the views.

        DuckDB may work on the answer for ``timeout`` seconds, by default for any time, and take ``memory`` bytes, by
        default half of those that are free.

        Raises:
            QueryError: it is no query, or DuckDB refuses it.
            QueryLimitError: it takes more time or memory, also where its rows are fetched.
            RunClosedError: the recording is closed.
        """
        self._demand_open()

        def connect() -> duckdb.DuckDBPyConnection:
            return filled_connection(self._parquet, self._journals, self.infos)

        return Result(connect, query, timeout=timeout, memory=memory)

    def execute(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> duckdb.DuckDBPyConnection:
        """Run a trusted query, of the library's own, and return a cursor to fetch its rows from.

        Raises:
            RunClosedError: the recording is closed.
        """
        self._demand_open()
        return self.connection.cursor().execute(query, parameters)

    def show_to(self, connection: duckdb.DuckDBPyConnection, view: str) -> None:
        """Add the records as a view to a connection that may read files, so that it can see several recordings.

        Raises:
            RunClosedError: the recording is closed.
        """
        self._demand_open()
        add_records(connection, self._parquet, self._journals, view)

    def close(self) -> None:
        """Let go of the files. Closing twice is harmless."""
        self._connection.close()
        self._finalizer()

    def _demand_open(self) -> None:
        if not self._finalizer.alive:
            raise RunClosedError(f"{self.path} is closed; open it again with gradtrace.open_run")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settled(self, source: Source) -> RunInfo:
        """Return the rank's facts; what an unfinished run could not count yet is counted here."""
        info = source.info
        if source.finished:
            return info
        query = "SELECT count(*), count(DISTINCT step), max(step) FROM records WHERE rank = ?"
        row = self._connection.cursor().execute(query, [info.rank]).fetchone()
        assert row is not None
        return replace(info, records=row[0], steps=row[1], last_step=row[2])


def _whose(info: RunInfo) -> str:
    return f"rank {info.rank}: " if info.world_size > 1 else ""


def _damage(source: Source, info: RunInfo) -> Iterator[str]:
    """Yield what is lost of what one rank had recorded, in words; ``info`` has what was counted."""
    whose = _whose(info)
    for words in source.damage:
        yield whose + words
    lost = source.info.records - info.records
    if lost > 0 and not source.damage:
        yield f"{whose}{lost:,} of {source.info.records:,} records are gone"


def _missing(source: Source, info: RunInfo) -> Iterator[str]:
    """Yield what else one rank's recording lacks, in words."""
    whose = _whose(info)
    for note in source.notes:
        yield whose + note
    if info.end == "killed" and info.last_step is None:
        yield f"{whose}the run was killed before a step was recorded"
    elif info.end == "killed" and source.damage:
        yield f"{whose}the run was killed; the last step that can be read is {info.last_step}"
    elif info.end == "killed":
        other = "" if os.access(parts_of(source.path), os.W_OK) else ", or its directory had become read-only"
        yield f"{whose}the step after {info.last_step} was in flight when the run was killed{other}"
    elif info.end == "running":
        yield f"{whose}the run is still being recorded; this is what there is up to step {info.last_step}"
    elif info.end.startswith(STOPPED):
        where = "before a step was recorded" if info.last_step is None else f"after step {info.last_step}"
        yield f"{whose}recording stopped {where}: {info.end.removeprefix(STOPPED)}; the training went on"
    if info.thinned:
        first, last, every = (info.thinned[key] for key in ("first_step", "last_step", "every"))
        yield f"{whose}steps {first} to {last} were thinned to save space: one in {every} is in full, or near incidents"
    if info.paced:
        first, last, steps = (info.paced[key] for key in ("first_step", "last_step", "steps"))
        least = "" if source.finished else "at least "
        yield (
            f"{whose}{least}{steps:,} of the steps {first} to {last} were thinned to watched ones, "
            "because the disk was slower than the training"
        )
    for reason, count in info.unmeasured.items():
        yield f"{whose}{count} boundaries were seen and not recorded: {reason}"
