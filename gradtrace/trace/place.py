"""Where a run is written: names for one rank and for several, and what becomes of an older run there.

Several processes may look for their place at the same time: the ranks of one launch, which share a directory,
and launches that know nothing of each other. All of them take turns.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradtrace.errors import RunExistsError
from gradtrace.trace.checking import json_object
from gradtrace.trace.lock import Hold, one_at_a_time
from gradtrace.trace.parts import INFO_FILE, LAUNCH_FILE, parts_of
from gradtrace.trace.process import is_writing, this_process
from gradtrace.trace.repair import remove_leftovers
from gradtrace.trace.runinfo import RunInfo

Existing = Literal["refuse", "overwrite", "move_aside"]


@dataclass(frozen=True)
class Place:
    """Where one process writes; the directory of the parts exists and is its own until ``hold`` is released.

    ``run_path`` is the run as a whole: the file, or the directory of several ranks.
    """

    path: Path
    parts: Path
    run_path: Path
    moved_to: Path | None
    hold: Hold
    process: dict[str, Any] = field(default_factory=this_process)

    def facts(self, info: RunInfo) -> str:
        """Return what stands in ``run.json``: the facts of the run, and who writes it."""
        values = json.loads(info.to_json()) | {"process": self.process | {"locked": self.hold.locked}}
        return json.dumps(values, allow_nan=False)


def claim(run_path: Path, info: RunInfo, existing: Existing) -> Place:
    """Find the place of the process that ``info`` describes and take it; from then on it reads as a run without rows.

    Raises:
        RunExistsError: there is an older run and it is not to be replaced, or it is being recorded.
        OSError: the place cannot be written.
    """
    run_path.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(run_path):
        if info.world_size == 1:
            moved_to = _make_room(run_path, existing)
            path = run_path
        else:
            path = run_path / _rank_file(info)
            moved_to = _enter(run_path, path, info, existing)
        return _take(path, run_path, moved_to, info)


def _take(path: Path, run_path: Path, moved_to: Path | None, info: RunInfo) -> Place:
    """Make the directory of the parts. In one go: whoever finds it finds the facts in it, and the lock held."""
    parts = parts_of(path)
    unborn = parts.with_name(f".{parts.name}.tmp")
    _remove(unborn)  # of a process that was killed here
    unborn.mkdir()
    place = Place(path, parts, run_path, moved_to, Hold(unborn))
    try:
        (unborn / INFO_FILE).write_text(place.facts(info))
        unborn.rename(parts)
    except BaseException:
        place.hold.release()
        shutil.rmtree(unborn, ignore_errors=True)
        raise
    return place


def _rank_file(info: RunInfo) -> str:
    attempt = f".attempt-{info.attempt}" if info.attempt else ""
    return f"rank-{info.rank}{attempt}.parquet"


def _enter(directory: Path, path: Path, info: RunInfo, existing: Existing) -> Path | None:
    """Enter the directory of a launch, or make it when this rank is the first to arrive."""
    launch = _read_json(directory / LAUNCH_FILE)
    if launch.get("run_id") == info.run_id and not _exists(path):
        moved_to = launch.get("moved_to")
        return Path(moved_to) if moved_to and isinstance(moved_to, str) else None
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
        _replace(run_path)
        return None
    remove_leftovers(run_path)
    aside = _free_name(run_path)
    for old, new in ((run_path, aside), (parts_of(run_path), parts_of(aside))):
        if old.exists():
            old.rename(new)
    return aside


def _replace(run_path: Path) -> None:
    """Remove a run. Its facts go first, so that nobody takes what is left of it for a whole one."""
    parts = parts_of(run_path)
    _remove(parts / INFO_FILE)
    for path in (parts, run_path):
        _remove(path)


def _exists(path: Path) -> bool:
    return os.path.lexists(path) or parts_of(path).exists()


def _refuse_foreign_or_live(run_path: Path) -> None:
    """Never move or remove a directory of something else, nor what another process is writing."""
    if run_path.is_dir():
        # With a dot before it: what a process that was killed has not finished.
        names = [path.name.removeprefix(".") for path in run_path.iterdir()]
        if any(name != LAUNCH_FILE and not name.startswith("rank-") for name in names):
            raise RunExistsError(f"{run_path} is a directory that is no run; pass -o with another name")
    for parts in (parts_of(run_path), *run_path.glob("rank-*.parts")):
        facts = _read_json(parts / INFO_FILE)
        if is_writing(parts, facts):
            raise RunExistsError(
                f"{run_path} is being recorded by process {facts['process'].get('pid')}; pass -o to write elsewhere"
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
        return json_object(path.read_bytes())
    except (OSError, ValueError):
        return {}
