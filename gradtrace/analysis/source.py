"""Opens the files of one rank: its finished file, or the pieces of a run that was killed or is being recorded.

Whether a file is whole is asked in ``soundness.py``, the pieces are opened in ``pieces.py``; what is left is to put
them together, and to say what of them is missing. A finished file is read by DuckDB alone: pyarrow, which is slow to
import, is only for journals.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from gradtrace.analysis.locate import demand_regular
from gradtrace.analysis.pieces import Pieces
from gradtrace.analysis.soundness import (
    DamagedError,
    demand_columns,
    demand_values,
    demand_whole,
    extent_of,
    metadata_of,
    problem_of,
)
from gradtrace.analysis.views import add_records
from gradtrace.errors import NotARunError
from gradtrace.trace.checking import json_object
from gradtrace.trace.parts import INFO_FILE, parts_of
from gradtrace.trace.process import is_writing
from gradtrace.trace.runinfo import ModuleInfo, NewerRunError, RunInfo

if TYPE_CHECKING:
    import pyarrow as pa

_UNKNOWN = "the command, the configuration, the types of modules and how the run ended are not known"
_NAME = re.compile(r"rank-(\d{1,6})(?:\.attempt-(\d{1,9}))?\.parquet", re.ASCII)
_OUTERMOST = """
SELECT DISTINCT module FROM guessed WHERE phase = 'input' AND tensor = 'input' AND module IS NOT NULL ORDER BY 1
"""


@dataclass
class Source:
    """The files of one rank.

    ``parquet`` are paths that DuckDB and Arrow can open for as long as ``open_files`` stays open; the rows of
    ``journals`` follow theirs. ``info.end`` is settled: "running" only where the writer still lives, "unknown" where
    the facts of the run are lost. ``damage`` says in words what is gone of what had been recorded, ``notes`` the rest.
    """

    path: Path
    info: RunInfo
    finished: bool
    parquet: list[str] = field(default_factory=list)
    journals: list[pa.Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        if self.finished:
            return not self.info.records
        return not self.parquet and not any(journal.num_rows for journal in self.journals)

    @property
    def is_known(self) -> bool:
        """Whether the facts of the run could be read; else all but the rank are guessed."""
        return bool(self.info.run_id)


class Opener:
    """Opens files and keeps them open; ``without_facts`` says whether it does without a ``run.json`` that is gone."""

    def __init__(self, open_files: ExitStack, connection: duckdb.DuckDBPyConnection, *, without_facts: bool) -> None:
        """``connection`` is one that may read files."""
        self._open_files = open_files
        self._connection = connection
        self._without_facts = without_facts

    def open(self, path: Path) -> Source:
        """Open a Parquet file or a ``.parts`` directory.

        Raises:
            NotARunError: it is no run that this gradtrace can read.
            FileNotFoundError: something was there and is gone.
            OSError: something cannot be read.
        """
        if path.suffix == ".parts" and path.is_dir():
            return self._open_parts(path)
        try:
            return self._open_file(path)
        except NewerRunError:
            raise
        except NotARunError as error:
            parts = parts_of(path)
            if not parts.is_dir():
                raise
            source = self._open_parts(parts, beside=path)
            source.notes.append(f"{path.name} is left out, it {problem_of(error, path)}; the pieces beside it are read")
            return source

    def _open_file(self, path: Path) -> Source:
        demand_regular(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            demand_whole(path, fd)
        finally:
            os.close(fd)
        file = str(path.absolute())
        try:
            info = RunInfo.from_json(metadata_of(path, file, self._connection), str(path))
            demand_columns(path, file, self._connection)
            demand_values({file: path}, self._connection)
            extent = extent_of(file, self._connection)
        except duckdb.Error as error:
            path.open("rb").close()  # if that is why, says so as an OSError
            raise DamagedError(path, problem_of(error, path)) from None
        if extent.rows < info.records:
            raise DamagedError(path, f"has {extent.rows:,} of its {info.records:,} records: another program changed it")
        if extent.ranks not in (None, (info.rank, info.rank)):
            raise DamagedError(path, f"is of rank {info.rank} and has records of another: another program changed it")
        return Source(path, info, finished=True, parquet=[file])

    def _open_parts(self, directory: Path, *, beside: Path | None = None) -> Source:
        """Open the pieces of a run; ``beside`` is the finished file that is none."""
        path = directory.with_suffix("")
        info, facts, problem = self._facts(directory)
        # A connection of its own: the other one remembers footers by name, and a descriptor's name is used again.
        with duckdb.connect() as connection:
            pieces = Pieces(directory, connection, None if info is None else info.rank)
            with pieces.opened as opened:
                if beside is None and path.is_file():  # some pieces may have been gone before they were seen
                    raise FileNotFoundError(errno.ENOENT, "finished meanwhile", str(directory))
                source = Source(path, info or _guessed(path, pieces, problem, connection), finished=False)
                source.parquet, source.journals = pieces.parquet, pieces.journals
                self._open_files.push(opened.pop_all())
        if info is None:
            source.damage.append(f"{INFO_FILE} {problem}: {_UNKNOWN}")
        else:
            _settle_the_end(source, directory, facts)
        source.damage += pieces.losses(source.info.end)
        return source

    def _facts(self, directory: Path) -> tuple[RunInfo | None, dict[str, Any], str]:
        """Return what ``run.json`` says, or None and what is wrong with it."""
        file = directory / INFO_FILE
        try:
            demand_regular(file)
            text = file.read_bytes()
            return RunInfo.from_json(text, str(file)), json_object(text), ""
        except FileNotFoundError:
            if not self._without_facts:
                raise
            return None, {}, "is missing"
        except NewerRunError:
            raise
        except NotARunError as error:
            return None, {}, problem_of(error, file)


def _guessed(path: Path, pieces: Pieces, problem: str, connection: duckdb.DuckDBPyConnection) -> RunInfo:
    """Return what the rows themselves tell of the run.

    Raises:
        NotARunError: there are none.
    """
    if not pieces.parquet and not any(rows.num_rows for rows in pieces.journals):
        raise NotARunError(f"{path} is no whole run: {INFO_FILE} {problem}, and there is no record beside it")
    add_records(connection, pieces.parquet, pieces.journals, "guessed")
    name = _NAME.fullmatch(path.name)
    return RunInfo(
        run_id="",
        attempt=int(name[2] or 0) if name else 0,
        rank=pieces.rank or 0,
        end="unknown",
        modules=[ModuleInfo(module, "unknown", root=True) for (module,) in connection.execute(_OUTERMOST).fetchall()],
    )


def _settle_the_end(source: Source, directory: Path, facts: dict[str, Any]) -> None:
    """Find out whether a run whose facts say that it is being recorded still is."""
    if source.info.end != "running":
        return
    writing = is_writing(directory, facts)
    if writing is None:
        source.notes.append(f"the run may still go on, on {facts['process'].get('host')}; taken as killed")
    source.info = replace(source.info, end="running" if writing else "killed")
