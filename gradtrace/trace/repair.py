"""Puts right what a writer left behind that was killed while it made one file of the pieces.

Two things can be left: pieces and a half-written file, then the file is made again; or the file and the pieces it
was made of, then these are removed. Either way the run reads the same before and after. All of it happens only where
nobody is in the way: the writer has died on this machine, the files are one's own, no other process is at the place.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from gradtrace.errors import NotARunError
from gradtrace.trace.checking import json_object
from gradtrace.trace.lock import Hold, one_at_a_time
from gradtrace.trace.parts import INFO_FILE, LAUNCH_FILE, MERGED_FILE, parts_of, remove_parts
from gradtrace.trace.process import is_alive
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import LARGE_FOOTERS
from gradtrace.trace.seal import find_damage

_LEFT_AS_IT_IS = (OSError, ValueError, NotARunError)
"""What comes of a full disk, of a directory that takes nothing, of damaged pieces: all this is read as it is."""


def repair(path: Path) -> None:
    """Finish an interrupted merge at ``path``, where one file of a run is to be; else, or in doubt, do nothing."""
    parts = parts_of(path)
    if not parts.is_dir() or not (path.is_file() or (parts / MERGED_FILE).is_file()):
        return
    with contextlib.suppress(*_LEFT_AS_IT_IS), one_at_a_time(_run_of(path), wait=False):
        _repair(path, parts)


def remove_leftovers(path: Path) -> None:
    """Remove the pieces beside the file that was made of them. To be called with the lock of the run."""
    parts = parts_of(path)
    if path.is_file() and parts.is_dir():
        with contextlib.suppress(*_LEFT_AS_IT_IS):
            _repair(path, parts)


def _repair(path: Path, parts: Path) -> None:
    if parts.stat().st_uid != os.geteuid():
        return
    hold = Hold(parts)
    try:
        facts = json_object((parts / INFO_FILE).read_bytes())
        if not hold.locked or not _has_died(facts):
            return
        info = RunInfo.from_json(json.dumps(facts), str(parts))
        if not path.is_file():
            _merge_again(parts, path, info)
        if _is_of(path, info) and _is_whole(path, info):
            remove_parts(parts)
    finally:
        hold.release()


def _has_died(facts: dict[str, Any]) -> bool:
    """Whether the writer had seen the end of the run before it died, on this machine."""
    return facts.get("end") != "running" and is_alive(facts.get("process") or {}) is False


def _merge_again(parts: Path, path: Path, info: RunInfo) -> None:
    # Slow to import, and seldom needed.
    from gradtrace.trace.merging import merge

    merge(parts, path, info)


def _is_of(path: Path, info: RunInfo) -> bool:
    """Whether the file is the run that ``info`` describes, and not one that was put there later."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, **LARGE_FOOTERS) as file:
        metadata = file.schema_arrow.metadata or {}
    made = RunInfo.from_json(metadata.get(METADATA_KEY, b""), str(path))
    return (made.run_id, made.rank, made.attempt) == (info.run_id, info.rank, info.attempt)


def _is_whole(path: Path, info: RunInfo) -> bool:
    """Whether the file has all that the pieces had: after a power failure it need not."""
    with path.open("rb") as file:
        return find_damage(file.fileno()) is None and _rows_in(file) >= info.records


def _rows_in(file: BinaryIO) -> int:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file, **LARGE_FOOTERS).metadata.num_rows


def _run_of(path: Path) -> Path:
    """Return what is locked when a run takes its place: the file, or the directory of several ranks."""
    return path.parent if (path.parent / LAUNCH_FILE).is_file() else path
