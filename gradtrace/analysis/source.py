"""Locates the files of a run, whatever state it is in: finished, killed, or being recorded right now.

A path may be a file, the directory of several ranks, the ``.parts`` directory of an unfinished run, a glob,
or the name that an unfinished run will have. Nothing here changes a file. A finished file is read by DuckDB
alone: pyarrow, which is slow to import, is only for journals.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import duckdb

from gradtrace.errors import NotARunError, RunNotFoundError
from gradtrace.trace.parts import INFO_FILE, part_of, parts_of, pieces
from gradtrace.trace.process import is_alive
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo

if TYPE_CHECKING:
    import pyarrow as pa

_ATTEMPTS = 20
_PAUSE = 0.05
"""A file may go away between two looks, because the writer has just put a better one in its place."""

_T = TypeVar("_T")


@dataclass
class Source:
    """The files of one rank.

    ``parquet`` are paths that DuckDB and Arrow can open for as long as ``open_files`` stays open; the rows of
    ``journals`` follow theirs. ``info.end`` is settled: "running" only where the writer still lives.
    """

    path: Path
    info: RunInfo
    finished: bool
    parquet: list[str] = field(default_factory=list)
    journals: list[pa.Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        if self.finished:
            return not self.info.records
        return not self.parquet and not any(journal.num_rows for journal in self.journals)


def find_sources(
    path: str, open_files: ExitStack, connection: duckdb.DuckDBPyConnection
) -> tuple[list[Source], list[str]]:
    """Return the ranks of the run at ``path``, by rank, and what is known to be missing.

    ``connection`` is one that may read files.

    Raises:
        RunNotFoundError: there is nothing at ``path``.
        NotARunError: what is there is no run that this gradtrace can read.
    """
    try:
        sources = _patiently(lambda: [_open(found, open_files, connection) for found in _locate(path)])
    except FileNotFoundError as error:
        raise NotARunError(f"{path} is no whole run: {error.filename} is missing") from None
    except OSError as error:
        raise NotARunError(f"{path} cannot be read: {error.strerror}") from None
    if len({source.info.run_id for source in sources}) > 1:
        names = ", ".join(sorted(source.path.name for source in sources))
        raise NotARunError(f"{path} holds several runs; name one of them: {names}")
    kept, missing = _latest_attempt(sources)
    return kept, missing + _missing_ranks(kept)


def _patiently(look: Callable[[], _T]) -> _T:
    for _ in range(_ATTEMPTS):
        try:
            return look()
        except FileNotFoundError:
            time.sleep(_PAUSE)
    return look()


def _locate(text: str) -> list[Path]:
    """Return the Parquet files and ``.parts`` directories that ``text`` means."""
    path = Path(text)
    parts = path if path.suffix == ".parts" else parts_of(path)
    if parts.is_dir():  # asked first: a writer puts the file there before it removes the parts
        finished = parts.with_suffix("")
        return [finished if finished.is_file() else parts]
    if path.is_dir():
        found = _runs_among(_settled(path.iterdir))
        if not found:
            raise NotARunError(f"{path} is a directory without a run in it")
        return found
    if path.exists():
        return [path]
    if glob.has_magic(text):
        return _matches(text)
    raise RunNotFoundError(f"no such file: {text}")


def _matches(pattern: str) -> list[Path]:
    matches = _settled(lambda: map(Path, glob.glob(pattern)))
    found = _runs_among(matches)
    for directory in matches:
        if directory.is_dir() and directory.suffix != ".parts":
            found += _runs_among(_settled(directory.iterdir))
    if found:
        return found
    beside = Path(pattern).parent
    names = sorted(path.name for path in _runs_among(beside.iterdir())) if beside.is_dir() else []
    there = f"; there are: {', '.join(names[:5])}" if names else ""
    raise RunNotFoundError(f"no file matches {pattern}{there}")


def _settled(look: Callable[[], Iterable[Path]]) -> list[Path]:
    """List until two looks agree: one that falls into a rename may see neither the old name nor the new."""
    before = None
    now = sorted(look())
    while now != before:
        before, now = now, sorted(look())
    return now


def _runs_among(paths: Iterable[Path]) -> list[Path]:
    """Return the runs among the paths, sorted; one that has not yet left its parts counts once."""
    there = set(paths)
    files = {path for path in there if path.suffix == ".parquet" and path.is_file()}
    parts = {path for path in there if path.name.endswith(".parquet.parts") and path.is_dir()}
    return sorted(files | {path for path in parts if path.with_suffix("") not in files})


def _open(path: Path, open_files: ExitStack, connection: duckdb.DuckDBPyConnection) -> Source:
    return _open_parts(path, open_files) if path.is_dir() else _open_file(path, connection)


def _open_file(path: Path, connection: duckdb.DuckDBPyConnection) -> Source:
    file = str(path.absolute())
    query = "SELECT value FROM parquet_kv_metadata(?) WHERE key = ?"
    try:
        found = connection.execute(query, [glob.escape(file), METADATA_KEY]).fetchall()
    except duckdb.Error:
        path.open("rb").close()  # if that is why, says so as an OSError
        raise NotARunError(f"{path} is not a Parquet file") from None
    if not found:
        raise NotARunError(f"{path} is a Parquet file, but not a gradtrace run")
    return Source(path, RunInfo.from_json(found[0][0], str(path)), finished=True, parquet=[file])


def _open_parts(directory: Path, open_files: ExitStack) -> Source:
    info_file = directory / INFO_FILE
    text = info_file.read_text()
    source = Source(directory.with_suffix(""), RunInfo.from_json(text, str(info_file)), finished=False)
    if source.info.end == "running":
        _settle_the_end(source, text)
    with ExitStack() as opened:
        for piece in _settled(lambda: pieces(directory)):
            _open_piece(piece, source, opened)
        if source.path.is_file():  # finished meanwhile: some pieces may have been gone before they were seen
            raise FileNotFoundError(errno.ENOENT, "finished meanwhile", str(directory))
        open_files.push(opened.pop_all())
    return source


def _open_piece(piece: Path, source: Source, opened: ExitStack) -> None:
    if piece.suffix == ".arrow":
        from gradtrace.trace.journal import read_journal

        try:
            source.journals.append(read_journal(piece))
            return
        except FileNotFoundError:  # encoded meanwhile
            piece = part_of(piece)
    # By descriptor: the data stays readable when the writer replaces and removes its parts.
    fd = os.open(piece, os.O_RDONLY)
    opened.callback(os.close, fd)
    source.parquet.append(f"/dev/fd/{fd}")


def _settle_the_end(source: Source, text: str) -> None:
    process = json.loads(text).get("process", {})
    alive = is_alive(process)
    if alive is None:
        source.notes.append(f"the run may still go on, on {process.get('host')}; taken as killed")
    source.info = replace(source.info, end="running" if alive else "killed")


def _latest_attempt(sources: list[Source]) -> tuple[list[Source], list[str]]:
    """Choose the last attempt that recorded anything: one that died as it began has nothing to say."""
    last = max(source.info.attempt for source in sources)
    chosen = max((source.info.attempt for source in sources if not source.is_empty), default=last)
    kept = [source for source in sources if source.info.attempt == chosen]
    older = sorted(source.path.name for source in sources if source.info.attempt < chosen)
    notes = [f"earlier attempts are left out: {', '.join(older)}"] if older else []
    if chosen < last:
        notes.append(f"attempts after {chosen} recorded nothing and are left out; the last one was attempt {last}")
    return sorted(kept, key=lambda source: source.info.rank), notes


def _missing_ranks(sources: list[Source]) -> list[str]:
    there = {source.info.rank for source in sources}
    world_size = max(source.info.world_size for source in sources)
    return [f"rank {rank} of {world_size} has no file" for rank in range(world_size) if rank not in there]
