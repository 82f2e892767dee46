"""Which files a path means: a run's file, the directory of several ranks, a ``.parts`` directory, a glob.

Only names and kinds of files are looked at here; what they hold is the business of ``source.py``.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from gradtrace.errors import NotARunError, RunNotFoundError
from gradtrace.trace.parts import parts_of
from gradtrace.trace.repair import repair

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def locate(text: str) -> list[Path]:
    """Return the Parquet files and ``.parts`` directories that ``text`` means.

    A merge that was interrupted is finished first.

    Raises:
        RunNotFoundError: there is nothing.
        NotARunError: there is something, but no run.
        OSError: a directory cannot be read.
    """
    path = Path(text) if text else Path("no such file")
    if path.name:
        parts = path if path.suffix == ".parts" else parts_of(path)
        repair(parts.with_suffix(""))
        if parts.is_dir():  # asked first: a writer puts the file there before it removes the parts
            return [_finished_or(parts)]
        if path.suffix == ".parts" and path.with_suffix("").is_file():  # they have just been made one file
            return [path.with_suffix("")]
    if path.is_dir():
        found = _runs_among(settled(path.iterdir))
        if not found:
            raise NotARunError(f"{path} is a directory without a run in it")
        return found
    if os.path.lexists(path) and text:
        return [path]
    if glob.has_magic(text):
        return _matches(text)
    raise RunNotFoundError(f"no such file: {text or repr(text)}")


def demand_regular(path: Path, *, may_be_empty: bool = False) -> None:
    """Refuse what cannot be read here and there, or has no end.

    Raises:
        NotARunError: it is a pipe, a device or the like, or there is nothing in it.
        OSError: it cannot be looked at.
    """
    facts = path.stat()
    for is_one, name in _KINDS:
        if is_one(facts.st_mode):
            raise NotARunError(f"{path} is {name}; a recording is read from a file")
    if not facts.st_size and not may_be_empty:
        raise NotARunError(f"{path} is empty: nothing of the recording has reached it")


def settled(look: Callable[[], Iterable[Path]]) -> list[Path]:
    """List until two looks agree: one that falls into a rename may see neither the old name nor the new."""
    before = None
    now = sorted(look())
    while now != before:
        before, now = now, sorted(look())
    return now


def _finished_or(parts: Path) -> Path:
    finished = parts.with_suffix("")
    return finished if finished.is_file() else parts


def _matches(pattern: str) -> list[Path]:
    matches = settled(lambda: map(Path, glob.glob(pattern)))
    found = _runs_among(matches)
    for directory in matches:
        if directory.is_dir() and directory.suffix != ".parts":
            found += _runs_among(settled(directory.iterdir))
    if found:
        return found
    beside = Path(pattern).parent
    names = sorted(path.name for path in _runs_among(beside.iterdir())) if beside.is_dir() else []
    there = f"; there are: {', '.join(names[:5])}" if names else ""
    raise RunNotFoundError(f"no file matches {pattern}{there}")


def _runs_among(paths: Iterable[Path]) -> list[Path]:
    """Return the runs among the paths, sorted; one that has not yet left its parts counts once."""
    there = set(paths)
    found = {path for path in there if path.suffix == ".parquet" and path.is_file()}
    for parts in there:
        if parts.name.endswith(".parquet.parts") and parts.is_dir():
            repair(parts.with_suffix(""))
            found.add(_finished_or(parts))
    return sorted(found)
