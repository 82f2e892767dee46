"""Where a run is written: names for one rank and for several, and what becomes of an older run there.

Several processes may look for their place at the same time: the ranks of one launch, which share a directory,
and launches that know nothing of each other. All of them take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradtrace.errors import RunExistsError
from gradtrace.trace.parts import INFO_FILE, parts_of
from gradtrace.trace.process import is_alive
from gradtrace.trace.runinfo import RunInfo

LAUNCH_FILE = "_launch.json"
"""In the directory of several ranks: which launch it belongs to, and where an older run was moved.

With a leading underscore engines that read a whole directory pass it over.
"""

Existing = Literal["refuse", "overwrite", "move_aside"]


@dataclass(frozen=True)
class Place:
    """Where one process writes; the directory of the parts exists and is its own.

    ``run_path`` is the run as a whole: the file, or the directory of several ranks.
    """

    path: Path
    parts: Path
    run_path: Path
    moved_to: Path | None


def claim(run_path: Path, info: RunInfo, existing: Existing) -> Place:
    """Find the place of the process that ``info`` describes and make it.

    Raises:
        RunExistsError: there is an older run and it is not to be replaced, or it is being recorded.
        OSError: the place cannot be written.
    """
    run_path.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(run_path):
        if info.world_size == 1:
            moved_to = _make_room(run_path, existing)
            path = run_path
        else:
            path = run_path / _rank_file(info)
            moved_to = _enter(run_path, path, info, existing)
        parts = parts_of(path)
        parts.mkdir()
    return Place(path, parts, run_path, moved_to)


def _rank_file(info: RunInfo) -> str:
    attempt = f".attempt-{info.attempt}" if info.attempt else ""
    return f"rank-{info.rank}{attempt}.parquet"


def _enter(directory: Path, path: Path, info: RunInfo, existing: Existing) -> Path | None:
    """Enter the directory of a launch, or make it when this rank is the first to arrive."""
    launch = _read_json(directory / LAUNCH_FILE)
    if launch.get("run_id") == info.run_id and not _exists(path):
        return Path(launch["moved_to"]) if launch["moved_to"] else None
    moved_to = _make_room(directory, existing)
    directory.mkdir()
    launch = {"run_id": info.run_id, "moved_to": str(moved_to) if moved_to else None}
    (directory / LAUNCH_FILE).write_text(json.dumps(launch))
    return moved_to


def _make_room(run_path: Path, existing: Existing) -> Path | None:
    """Deal with an older run at ``run_path``; return where it has been moved."""
    if not _exists(run_path):
        return None
    _refuse_foreign_or_live(run_path)
    if existing == "refuse":
        raise RunExistsError(
            f"{run_path} exists; pass --force (overwrite=True) to replace it, or -o to write elsewhere"
        )
    if existing == "overwrite":
        for path in (run_path, parts_of(run_path)):
            _remove(path)
        return None
    aside = _free_name(run_path)
    for old, new in ((run_path, aside), (parts_of(run_path), parts_of(aside))):
        if old.exists():
            old.rename(new)
    return aside


def _exists(path: Path) -> bool:
    return os.path.lexists(path) or parts_of(path).exists()


def _refuse_foreign_or_live(run_path: Path) -> None:
    """Never move or remove a directory of something else, nor what another process is writing."""
    if run_path.is_dir():
        names = [path.name for path in run_path.iterdir()]
        if any(name != LAUNCH_FILE and not name.startswith("rank-") for name in names):
            raise RunExistsError(f"{run_path} is a directory that is no run; pass -o with another name")
    for info_file in (parts_of(run_path) / INFO_FILE, *run_path.glob(f"rank-*.parts/{INFO_FILE}")):
        values = _read_json(info_file)
        if values.get("end") == "running" and is_alive(values.get("process", {})):
            raise RunExistsError(
                f"{run_path} is being recorded by process {values['process']['pid']}; pass -o to write elsewhere"
            )


def _free_name(path: Path) -> Path:
    number = 1
    while _exists(path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


@contextlib.contextmanager
def _one_at_a_time(run_path: Path) -> Iterator[None]:
    """Hold the lock of ``run_path`` among all processes; its file is gone afterwards."""
    lock = run_path.with_name(f".{run_path.name}.lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Some network file systems cannot lock; ranks there can still meet, only not in the same instant.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if _is_file(fd, lock):
            break
        os.close(fd)  # the one before us removed the file while we waited
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
