"""``Recording``: a run on disk, opened. Files in (``source.py``), DuckDB views out (``views.sql``).

The library's own queries run on ``Recording.connection``; queries of other people go through ``Recording.sql``,
which answers them where no file can be reached (``sandbox.py``). What is asked of it stands in rooms of its own.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb

from gradtrace.analysis.sandbox import Result
from gradtrace.analysis.source import Source, find_sources
from gradtrace.analysis.views import add_records, add_views, native_connection, sandboxed_connection
from gradtrace.errors import RunClosedError
from gradtrace.trace.runinfo import RunInfo

if TYPE_CHECKING:
    from typing_extensions import Self

# The same as in the view `steps`, which counts much more.
_CAPTURED = """
SELECT count(*) FROM (
    SELECT rank, step FROM records WHERE tensor IN ('input', 'grad_output', 'grad') AND op IS NULL
    EXCEPT
    SELECT rank, step FROM records WHERE tensor = 'grad_norm'
) GROUP BY rank
"""


class Recording:
    """A recording. Close it, or use it as a context manager.

    ``infos`` holds the facts of each rank, ``info`` those of the first. ``end`` says how the run ended:
    "completed", "running", "killed", or what ``RunInfo.end`` has. ``missing`` says in words what the
    recording does not hold and why. ``steps`` is the number of recorded steps. ``connection`` is a DuckDB
    connection with the views records, params, grads, steps, modules, events and meta.
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
        self.connection = native_connection()
        sources, self.missing = find_sources(self.path, self._files, self.connection)
        self._parquet = [file for source in sources for file in source.parquet]
        self._journals = [table for source in sources for table in source.journals]
        add_records(self.connection, self._parquet, self._journals)
        self.infos: list[RunInfo] = [self._settled(source) for source in sources]
        for source, info in zip(sources, self.infos, strict=True):
            self.missing += _missing(source, info)
        add_views(self.connection, self.infos)

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
    def captured(self) -> int:
        """Number of those steps that were captured in full, not only watched; of several ranks, the largest."""
        if not self.execute("SELECT 1 FROM records WHERE tensor = 'grad_norm' LIMIT 1").fetchall():
            return self.steps
        found = self.execute(_CAPTURED).fetchall()
        return max((count for (count,) in found), default=0)

    def sql(self, query: str) -> Result:
        """Answer one query that only reads, with no access to anything but the views.

        Raises:
            QueryError: it is no query, or DuckDB refuses it.
            RunClosedError: the recording is closed.
        """
        self._demand_open()
        return Result(lambda: sandboxed_connection(self._parquet, self._journals, self.infos), query)

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
        self.connection.close()
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
        row = self.execute(query, [info.rank]).fetchone()
        assert row is not None
        return replace(info, records=row[0], steps=row[1], last_step=row[2])


def _missing(source: Source, info: RunInfo) -> Iterator[str]:
    """Yield what one rank's recording lacks, in words."""
    whose = f"rank {info.rank}: " if info.world_size > 1 else ""
    for note in source.notes:
        yield whose + note
    if info.end == "killed" and info.last_step is None:
        yield f"{whose}the run was killed before a step was recorded"
    elif info.end == "killed":
        yield f"{whose}the step after {info.last_step} was in flight when the run was killed"
    elif info.end == "running":
        yield f"{whose}the run is still being recorded; this is what there is up to step {info.last_step}"
    elif info.end.startswith("tracer failed"):
        yield f"{whose}recording stopped after step {info.last_step}, the training went on"
    if info.thinned:
        first, last, every = (info.thinned[key] for key in ("first_step", "last_step", "every"))
        yield f"{whose}steps {first} to {last} were thinned to save space: one in {every} is in full, or near incidents"
    for reason, count in info.unmeasured.items():
        yield f"{whose}{count} boundaries were seen and not recorded: {reason}"
