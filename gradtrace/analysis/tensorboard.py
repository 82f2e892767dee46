"""A recording as event files for TensorBoard: curves of a run and of its modules, one scalar a step.

What becomes a scalar is in ``tensorboard.sql``. The package ``tensorboard`` frames and writes it; neither TensorFlow
nor torch is imported. Steps are read a stretch at a time, so that memory does not grow with the recording.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from gradtrace.analysis.recording import Recording, answers
from gradtrace.errors import MissingPackageError, NoMatchError, RunExistsError

_SUFFIX = ".gradtrace"  # how an earlier export is told from other event files
_RECORDS_AT_ONCE = 250_000
_SCALARS_AT_ONCE = 100_000
_LARGEST = 3.4028234663852886e38  # TensorBoard's scalars are float32: what is finite must not become inf

_COUNTS = """
SELECT step, count(*)
FROM records
WHERE ($first IS NULL OR step >= $first) AND ($after IS NULL OR step < $after)
    AND (step % $every = 0 OR step IN (SELECT step FROM events WHERE event = 'incident'))
GROUP BY step
ORDER BY step
"""
_LABEL = """
CREATE OR REPLACE MACRO label(module) AS
CASE module WHEN '' THEN '(root)' WHEN '(root)' THEN '"(root)"' ELSE module END
"""
_BAD = """
SELECT DISTINCT module
FROM records
WHERE (nan_count > 0 OR posinf_count > 0 OR neginf_count > 0) AND op IS NULL AND phase NOT IN ('replay', 'event')
    AND step IN (SELECT unnest($steps::BIGINT[])) AND module IS NOT NULL
"""

Rows = Iterator[tuple[int, int, float, str, float]]


@dataclass(frozen=True)
class Exported:
    """What was written: the files, and the numbers of steps, of curves (over all ranks) and of scalars."""

    files: list[str]
    steps: int
    curves: int
    scalars: int


def require_package() -> None:
    """See that the package is there, before anything is read.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        hint = "pip install 'gradtrace[tensorboard]'"
        raise MissingPackageError(f"event files for TensorBoard need its package: {hint}") from None


@answers
def export(
    run: Recording,
    directory: str | os.PathLike[str],
    *,
    steps: tuple[int | None, int | None] | None = None,
    every: int = 1,
    force: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Exported:
    """Write the scalars of a recording to event files: in ``directory``, or one below it for each of several ranks.

    ``steps`` limits it to steps from the first up to, not including, the second; ``every`` to those whose number it
    divides and those in which an incident began. An earlier export is replaced with ``force``, other event files stay.
    ``progress`` is called with the share that is done, from 0 to 1.

    Raises:
        MissingPackageError: the package tensorboard is not installed.
        NoMatchError: there are no such steps, or none at all yet.
        RunExistsError: there is an earlier export, and no ``force``.
        OSError: the files cannot be written.
    """
    require_package()
    earlier = _earlier(Path(directory))
    if earlier and not force:
        raise RunExistsError(f"{directory} has an earlier export; pass --force to replace it, or another directory")
    first, after = steps or (None, None)
    counts = run.execute(_COUNTS, {"first": first, "after": after, "every": every}).fetchall()
    if not counts:
        raise NoMatchError(f"the recording has no steps{' of these' if steps or every > 1 else ''}")
    with ExitStack() as stack:
        writers = _writers(run, Path(directory), stack)
        for rank, step, moment, values in _events(_rows(run, counts, progress)):
            writers[rank].add(step, moment, values)
    for path in earlier:
        path.unlink()
    for writer in writers.values():
        writer.publish()
    return Exported(
        files=[str(writer.path) for writer in writers.values()],
        steps=len(counts),
        curves=sum(len(writer.tags) for writer in writers.values()),
        scalars=sum(writer.scalars for writer in writers.values()),
    )


def _earlier(directory: Path) -> list[Path]:
    """Return the files of an earlier export of one or of several ranks."""
    name = f"events.out.tfevents.*{_SUFFIX}"
    return [*directory.glob(name), *directory.glob(f"rank-*/{name}")]


def _rows(run: Recording, counts: list[tuple[int, int]], progress: Callable[[float], None]) -> Rows:
    """Yield rank, step, time (seconds since 1970), tag and value, in order of step and rank."""
    query = resources.files("gradtrace.analysis").joinpath("tensorboard.sql").read_text(encoding="utf-8")
    run.execute(_LABEL)
    bad = [module for (module,) in run.execute(_BAD, {"steps": [step for step, _ in counts]}).fetchall()]
    done = 0
    progress(0.0)
    for steps in _stretches(counts):
        bounds = {"first": steps[0], "last": steps[-1], "steps": steps, "bad": bad}
        found = run.execute(query, bounds)
        while some := found.fetchmany(_SCALARS_AT_ONCE):
            yield from some
        done += len(steps)
        progress(done / len(counts))


def _stretches(counts: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield consecutive steps that have about ``_RECORDS_AT_ONCE`` records together, at least one step at a time."""
    steps: list[int] = []
    records = 0
    for step, count in counts:
        if steps and records + count > _RECORDS_AT_ONCE:
            yield steps
            steps, records = [], 0
        steps.append(step)
        records += count
    yield steps


def _events(rows: Rows) -> Iterator[tuple[int, int, float, list[tuple[str, float]]]]:
    """Yield rank, step, time and scalars; a step of a million modules in several events, which TensorBoard joins."""
    for (step, rank), group in groupby(rows, key=lambda row: (row[1], row[0])):
        while members := list(islice(group, _SCALARS_AT_ONCE)):
            yield rank, step, members[0][2], [(tag, value) for *_, tag, value in members]


def _writers(run: Recording, directory: Path, stack: ExitStack) -> dict[int, _Writer]:
    several = len(run.infos) > 1 or run.info.world_size > 1
    ranks = sorted({info.rank for info in run.infos})
    places = {rank: directory / f"rank-{rank}" if several else directory for rank in ranks}
    return {rank: stack.enter_context(_Writer(place)) for rank, place in places.items()}


class _Writer:
    """One event file. It gets the name by which TensorBoard knows such files once it is whole."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"events.out.tfevents.{time.time_ns() // 10**9:010d}{_SUFFIX}"
        self.tags: set[str] = set()
        self.scalars = 0
        self._unfinished = directory / f"export.{os.getpid()}.unfinished"
        self._event = Event
        # Not the package's EventFileWriter: that imports TensorFlow where it is installed.
        self._writer = RecordWriter(self._unfinished.open("wb"))
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add(self, step: int, moment: float, values: list[tuple[str, float]]) -> None:
        event = self._event(step=step, wall_time=moment)
        for tag, value in values:
            event.summary.value.add(tag=tag, simple_value=_single(value))
        self._writer.write(event.SerializeToString())
        self.tags.update(tag for tag, _ in values)
        self.scalars += len(values)

    def publish(self) -> None:
        self._unfinished.replace(self.path)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            self._writer.close()
        finally:
            if kind is not None:
                self._unfinished.unlink()


def _single(value: float) -> float:
    return max(-_LARGEST, min(value, _LARGEST)) if math.isfinite(value) else value
