"""The limit on disk: it holds while a run is recorded, what is to stay stays, and no moment is a bad one to die in."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gradtrace.analysis.run import open_run
from gradtrace.analysis.verdict import first_nan
from gradtrace.trace import merging
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.parts import pieces
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.shelf import Shelf, _in_ranges
from gradtrace.trace.writer import RunWriter

LAYERS = [f"layers.{number}" for number in range(40)]
MODULES = [ModuleInfo("", "Net", root=True), *(ModuleInfo(name, "Linear", depth=1) for name in LAYERS)]
INFO = RunInfo("r", modules=MODULES, end="completed")
ROWS = 6 * len(LAYERS) + 4


def step_rows(step: int, nan_from: int | None = None) -> list[Record]:
    """Return a step of numbers that do not compress; gradients are NaN from layer ``nan_from`` backwards."""
    numbers = random.Random(step)
    seq = itertools.count(step * ROWS)

    def row(phase: str, tensor: str, module: str | None, path: str = "0", *, bad: bool = False, call: int | None = 0):
        value = numbers.uniform(1, 2)
        counts = {"nan_count": 8 if bad else 0, "posinf_count": 0, "neginf_count": 0, "numel": 8}
        found: dict[str, Any] = dict.fromkeys(("min", "max", "norm")) if bad else {"min": -value, "max": value}
        found = {"norm": None if bad else 3 * value, **found, **counts, "dtype": "float32", "shape": "[8]"}
        return Record(step, next(seq), phase, tensor, module, path, call, device="cpu", **found)

    rows = [row("input", "input", "")]
    for name in LAYERS:
        rows += [row("forward", "input", name), row("forward", "output", name)]
    rows += [row("forward", "output", ""), row("loss", "loss", None, "", call=None)]
    for number, name in reversed(list(enumerate(LAYERS))):
        bad = nan_from is not None and number <= nan_from
        arrives_bad = nan_from is not None and number < nan_from
        rows.append(row("backward", "grad_output", name, bad=arrives_bad))
        rows.append(row("backward", "grad", name, "weight", bad=bad, call=None))
        rows.append(row("backward", "grad_input", name, bad=bad))
    rows.append(row("optimizer", "lr", None, "0.0", call=None))
    rows += [row("optimizer", "param", name, "weight", call=None) for name in LAYERS]
    return rows


def write(writer: RunWriter, steps: range, bad: range = range(0)) -> None:
    for step in steps:
        writer.write(batch_of_records(step_rows(step, nan_from=5 if step in bad else None)))
        if step in bad:
            writer.protect(step)


def rows_by_step(path: Path) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = defaultdict(Counter)
    with open_run(path) as run:
        rows = run.execute("SELECT seq, step, tensor FROM records").fetchall()
    assert [seq for seq, _, _ in rows] == sorted({seq for seq, _, _ in rows})
    for _, step, tensor in rows:
        found[step][tensor] += 1
    return found


FULL = Counter(Counter(row.tensor for row in step_rows(0)))
WATCHED = Counter({"output": 1, "loss": 1, "lr": 1, "grad_norm": 1})


@contextmanager
def sampled(directory: Path) -> Iterator[list[int]]:
    """Look all the time at how many bytes a directory holds."""
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            found.append(sum(_size(entry) for entry in os.scandir(directory)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # replaced or removed since it was listed
        return 0


def test_the_disk_never_holds_more_than_the_limit_and_every_step_is_there(tmp_path):
    limit, steps = 1_000_000, 300
    said: list[tuple[str, threading.Thread]] = []
    writer = RunWriter(
        tmp_path / "run.parquet",
        INFO,
        max_bytes=limit,
        on_thinned=lambda sentence: said.append((sentence, threading.current_thread())),
    )
    with sampled(tmp_path / "run.parquet.parts") as sizes:
        write(writer, range(steps))
    writer.finish(INFO)
    assert limit / 2 < max(sizes) <= limit
    assert (tmp_path / "run.parquet").stat().st_size <= limit
    found = rows_by_step(tmp_path / "run.parquet")
    assert list(found) == list(range(steps))
    kinds = {step: "full" if rows == FULL else "watched" if rows == WATCHED else rows for step, rows in found.items()}
    assert set(kinds.values()) == {"full", "watched"}
    with open_run(tmp_path / "run.parquet") as run:
        info = run.info
    every, last = info.thinned["every"], info.thinned["last_step"]
    assert every & (every - 1) == 0  # a power of two
    assert {kinds[step] for step in range(0, last, every)} == {"full"}
    assert {kinds[step] for step in range(last + 1, steps)} == {"full"}
    assert steps - last > 10
    assert info.records == writer.rows == sum(sum(rows.values()) for rows in found.values())
    [(sentence, thread)] = said
    assert sentence.startswith("to stay within 1 MB, steps ")
    assert "one in 2 is kept in full" in sentence
    assert thread is threading.current_thread()
    assert [f"steps {info.thinned['first_step']} to {last} were thinned" in note for note in info.notes] == [True]


def test_rows_that_were_thinned_are_never_taken_for_lost_ones(tmp_path):
    # A run that is read, or killed, when steps have just been thinned and that has not been noted yet.
    path = tmp_path / "run.parquet"
    writer = RunWriter(path, INFO, rows_per_part=4 * ROWS, max_bytes=400_000)
    writer.update(replace(INFO, end="running"))
    thinned = 0
    for step in range(100):
        before = writer.rows
        write(writer, range(step, step + 1))
        writer._background.wait(0)
        if writer.rows > before and step % 10:
            continue
        thinned += writer.rows < before
        with open_run(path) as run:
            assert run.damage == [], step
            assert run.info.records == writer.rows
    assert thinned > 3
    writer.finish(INFO)
    with open_run(path) as run:
        assert run.damage == []
        assert run.info.records == writer.rows == run.execute("SELECT count(*) FROM records").fetchall()[0][0]


def test_without_a_limit_nothing_is_thinned(tmp_path):
    for name, most in (("none", None), ("zero", 0)):
        writer = RunWriter(tmp_path / name, INFO, max_bytes=most, rows_per_part=4 * ROWS)
        write(writer, range(20))
        writer.finish(INFO)
        assert set(map(frozenset, rows_by_step(tmp_path / name).values())) == {frozenset(FULL)}
        with open_run(tmp_path / name) as run:
            assert (run.info.thinned, run.info.notes, run.info.records) == ({}, [], 20 * ROWS)


def test_the_default_limit_is_two_gigabytes():
    assert RunWriter.__init__.__kwdefaults__["max_bytes"] == 2_000_000_000


def test_the_verdict_of_an_incident_in_the_middle_is_what_it_would_have_been(tmp_path):
    verdicts = []
    for most in (None, 1_000_000):
        path = tmp_path / f"run-{most}.parquet"
        writer = RunWriter(path, INFO, max_bytes=most)
        write(writer, range(250), bad=range(120, 123))
        writer.finish(RunInfo("r", modules=MODULES, end="completed", steps=250, last_step=249))
        with open_run(path) as run:
            verdicts.append(first_nan(run).to_dict())
    whole, thin = verdicts
    assert thin.pop("run")["steps"] == whole.pop("run")["steps"] == 250
    assert (thin["step"], thin["module"], thin["tensor"]) == (120, "layers.5", "grad")
    assert thin == whole
    by_step = rows_by_step(tmp_path / "run-1000000.parquet")
    assert [by_step[step] == FULL for step in range(110, 133)] == [True] * 23
    assert [by_step[step] == FULL for step in range(90, 110)].count(False) >= 15


def test_an_event_that_tells_of_a_failure_protects_its_step(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", INFO, max_bytes=1_000_000)
    event = Record(100, 101 * ROWS, "event", "incident", detail="loss is nan")
    write(writer, range(101))
    writer.write(batch_of_records([event]))
    for step in range(101, 220):
        writer.write(batch_of_records([row._replace(seq=row.seq + 1) for row in step_rows(step)]))
    writer.finish(INFO)
    by_step = rows_by_step(tmp_path / "run.parquet")
    assert by_step[100] == FULL + Counter({"incident": 1})
    assert [by_step[step] == FULL for step in (*range(90, 100), *range(101, 111))] == [True] * 20


def test_a_step_that_lies_in_two_parts_has_one_norm_or_none(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", INFO, max_bytes=600_000)
    for step in range(150):
        rows = step_rows(step)
        middle = next(n for n, row in enumerate(rows) if row.tensor == "grad") + 7
        for part in (rows[:middle], rows[middle:]):
            writer.write(batch_of_records(part))
    writer.finish(INFO)
    by_step = rows_by_step(tmp_path / "run.parquet")
    assert {frozenset(rows.items()) for rows in by_step.values()} == {
        frozenset(FULL.items()),
        frozenset(WATCHED.items()),
    }


def watched_rows(step: int) -> list[Record]:
    rows = []
    for number, (phase, tensor) in enumerate((("loss", "loss"), ("backward", "grad_norm"), ("optimizer", "lr"))):
        value = random.Random(3 * step + number).randrange(2**20) / 2**20
        rows.append(Record(step, 3 * step + number, phase, tensor, min=value, max=value, norm=value, nan_count=0))
    return rows


def test_a_run_too_long_for_watched_steps_keeps_every_loss(tmp_path):
    limit, reserve, steps = 300_000, 20_000, 8000
    shelf = Shelf(tmp_path, limit, rows_per_part=10_000)
    for index in range(steps // 100):
        rows = [row for step in range(100 * index, 100 * index + 100) for row in watched_rows(step)]
        table = pa.Table.from_batches([batch_of_records(rows)])
        path = tmp_path / f"part-{index:06d}.parquet"
        merging.write_part(path, table)
        shelf.add(path, index, table)
        shelf.fit(reserve)
        assert sum(piece.stat().st_size for piece in pieces(tmp_path)) <= limit - reserve
    tables = [merging.read_part(piece).select(["step", "tensor"]) for piece in pieces(tmp_path)]
    there = [tuple(row.values()) for table in tables for row in table.to_pylist()]
    assert [step for step, tensor in there if tensor == "loss"] == list(range(steps))
    norms = {step for step, tensor in there if tensor == "grad_norm"}
    assert shelf.thinned is not None
    every = shelf.thinned.plan.watched
    assert every > 1
    assert set(range(0, steps // 4, every)) == {step for step in norms if step < steps // 4}
    assert set(range(steps - steps // 20, steps)) <= norms


DIES = """
    import itertools, os, signal, sys
    from pathlib import Path
    from test_shelf import INFO, write
    from gradtrace.trace import shelf
    from gradtrace.trace.writer import RunWriter

    where, number = sys.argv[2], int(sys.argv[3])
    count = itertools.count(1)
    def dies(function):
        def call(path, *values, **options):
            if path.name.startswith("part-") and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(path, *values, **options)
        return call
    real_write = shelf.write_part
    def write_part(path, table):  # of what is thinned or joined, not of what is encoded
        if where == "before the rename":
            real_replace = Path.replace
            Path.replace = dies(real_replace)
            real_write(path, table)
            Path.replace = real_replace
        else:
            real_write(path, table)
    shelf.write_part = write_part
    if where == "while joined parts are removed":
        Path.unlink = dies(Path.unlink)
    writer = RunWriter(sys.argv[1], INFO, max_bytes=600_000)
    write(writer, range(200))
"""


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("before the rename", 1),
        ("before the rename", 40),
        ("while joined parts are removed", 1),
        ("while joined parts are removed", 12),
    ],
)
def test_killed_at_any_moment_each_part_is_whole_old_or_new(tmp_path, where, number):
    path = tmp_path / "run.parquet"
    command = [sys.executable, "-c", textwrap.dedent(DIES), path, where, str(number)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.run(command, env=environment, check=False)
    assert process.returncode == -signal.SIGKILL
    by_step = rows_by_step(path)
    assert list(by_step) == list(range(len(by_step)))
    last = max(by_step)
    for step, rows in by_step.items():
        assert rows in (FULL, WATCHED), step
    assert last > 20
    names = {piece.name for piece in pieces(tmp_path / "run.parquet.parts")}
    left_behind = {entry.name for entry in (tmp_path / "run.parquet.parts").iterdir()} - names - {"run.json"}
    if where == "before the rename":
        assert any(name.endswith(".tmp") for name in left_behind)
    else:  # parts whose rows are in the joined one too
        assert any(name.endswith(".parquet") for name in left_behind)


def test_a_part_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run.parquet", INFO, max_bytes=None, rows_per_part=ROWS)
    write(writer, range(1))
    writer._background.close()
    writer.close_parts(INFO)
    [piece] = pieces(tmp_path / "run.parquet.parts")

    def full(table: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging.pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        merging.write_part(piece, pa.Table.from_batches([batch_of_records([])]))
    monkeypatch.undo()
    assert rows_by_step(tmp_path / "run.parquet") == {0: FULL}
    assert pieces(tmp_path / "run.parquet.parts") == [piece]
    assert not list((tmp_path / "run.parquet.parts").glob("*.tmp"))


def test_steps_captured_in_full_are_kept_as_few_ranges_and_none_is_lost() -> None:
    every = (0, 1, 2, 3, 4, 8, 16, 24, 25, 26)
    assert _in_ranges(every) == (range(5), range(8, 25, 8), range(25, 27))
    assert _in_ranges(range(10**6)) == (range(10**6),)
    assert _in_ranges([]) == ()
    generator = random.Random(0)
    for _ in range(500):
        steps = sorted(generator.sample(range(60), generator.randrange(40)))
        assert list(itertools.chain.from_iterable(_in_ranges(steps))) == steps
