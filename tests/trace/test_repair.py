"""A run whose merge was interrupted: it reads right in every state, and opening it finishes what was begun."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gradtrace.analysis.run import open_run
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.lock import one_at_a_time
from gradtrace.trace.process import this_process
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

STEPS = 40
NOBODY = 65534

MERGES = """
    import os, signal, sys
    from pathlib import Path
    import pyarrow.parquet as pq
    from gradtrace.trace import merging
    from gradtrace.trace import writer as writer_module
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.schema import Record
    from gradtrace.trace.writer import RunWriter

    number, *places = sys.argv[1:]
    for place in places[:-1]:  # forked, since imports are slow
        child = os.fork()
        if child == 0:
            places = [place]
            break
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    path, where, rank = places[-1].split(":")
    path, number = Path(path), int(number)
    facts = dict(rank=int(rank or 0), world_size=2 if rank else 1)

    def before(owner, name, count=1):
        function, calls = getattr(owner, name), [0]
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), number)
            return function(*args, **options)
        setattr(owner, name, call)

    writer = RunWriter(path, RunInfo("r", **facts), rows_per_part=12)
    for step in range(40):
        seen = [("forward", "output", f"layer.{n}", step + n / 4) for n in range(3)]
        rank = facts["rank"]
        rows = [Record(step, 3 * step + n, *row[:3], max=row[3], rank=rank) for n, row in enumerate(seen)]
        writer.write(batch_of_records(rows))
    writer._background.wait(0)
    if where == "half written":
        merging.ROWS_PER_GROUP = 16
        before(pq.ParquetWriter, "write_table", 4)
    elif where == "whole, not renamed":
        before(merging, "_reach_the_disk")
    elif where == "renamed":
        before(writer_module, "remove_parts")
    else:
        remove = writer_module.remove_parts
        writer_module.remove_parts = lambda parts: (before(Path, "unlink", 4), remove(parts))
    writer.finish(RunInfo("r", **facts, end="exit 3", steps=40, last_step=39))
"""
STATES = ["half written", "whole, not renamed", "renamed", "parts half removed"]


def merging_process(number: int, *places: str) -> subprocess.Popen[bytes]:
    """Start a process that gets a signal from itself while it merges, at each place: PATH:STATE:[RANK]."""
    words = [sys.executable, "-c", textwrap.dedent(MERGES), str(int(number)), *places]
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def kill(*places: str) -> None:
    """Have the writer at each place killed while it merges."""
    assert merging_process(signal.SIGKILL, *places).wait(60) == -signal.SIGKILL


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each state, with a run whose writer was killed in it."""
    found = {state: tmp_path_factory.mktemp("killed") for state in STATES}
    kill(*(f"{directory / 'run.parquet'}:{state}:" for state, directory in found.items()))
    return found


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


EXPECTED = [(n // 3, n, f"layer.{n % 3}", n // 3 + n % 3 / 4) for n in range(3 * STEPS)]


def assert_reads_right(path: Path | str) -> None:
    with open_run(path) as run:
        assert run.execute("SELECT step, seq, module, max FROM records ORDER BY seq").fetchall() == EXPECTED
        assert (run.end, run.steps, run.info.records, run.missing) == ("exit 3", STEPS, 3 * STEPS, [])


def test_the_states_are_those_in_which_a_merge_can_be_interrupted(interrupted: dict[str, Path]) -> None:
    there = {state: names(directory) for state, directory in interrupted.items()}
    half, whole, renamed, removed = (there[state] for state in STATES)
    merged = "run.parquet.parts/merged.parquet.tmp"
    assert merged in half
    assert half == whole
    reserve = "run.parquet.parts/reserve.tmp"  # given back first
    assert set(renamed) == {*half, "run.parquet"} - {merged, reserve}
    assert {"run.parquet", "run.parquet.parts/run.json"} < set(removed) < set(renamed)
    with pytest.raises(Exception, match="Parquet"):
        pq.read_metadata(interrupted["half written"] / merged)
    assert pq.read_metadata(interrupted["whole, not renamed"] / merged).num_rows == 3 * STEPS


@pytest.mark.parametrize("name", ["run.parquet", "run.parquet.parts", "*.parquet*", "."])
@pytest.mark.parametrize("state", STATES)
def test_opening_an_interrupted_run_repairs_it(
    tmp_path: Path, interrupted: dict[str, Path], state: str, name: str
) -> None:
    shutil.copytree(interrupted[state], tmp_path, dirs_exist_ok=True)
    assert_reads_right(tmp_path / name)
    assert names(tmp_path) == ["run.parquet"]
    assert_reads_right(tmp_path / "run.parquet")
    file = pq.ParquetFile(tmp_path / "run.parquet")
    assert file.read()["seq"].to_pylist() == list(range(3 * STEPS))
    info = RunInfo.from_json(file.schema_arrow.metadata[METADATA_KEY], "x")
    assert (info.run_id, info.end, info.steps, info.records) == ("r", "exit 3", STEPS, 3 * STEPS)
    assert info.command == []


def test_readers_that_come_at_once_all_read_it_right(tmp_path: Path, interrupted: dict[str, Path]) -> None:
    for state in STATES:
        shutil.copytree(interrupted[state], tmp_path / state)
        with one_at_a_time(tmp_path / state / "run.parquet"):  # so this one finds it as it was left ...
            early = open_run(tmp_path / state / "run.parquet")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(assert_reads_right, [tmp_path / state / "run.parquet"] * 4))
        assert_reads_right(tmp_path / state / "run.parquet")
        assert names(tmp_path / state) == ["run.parquet"]
        with early:  # ... and can be asked after it was repaired
            assert early.execute("SELECT count(*), sum(seq) FROM records").fetchall() == [(120, 7140)]


@contextmanager
def stranger(directory: Path) -> Iterator[None]:
    """Be somebody who may read ``directory`` and not write there; root can become another user for that."""
    directory.chmod(0o555)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)
        directory.chmod(0o755)


def test_who_may_only_read_reads_it_right_and_changes_nothing(interrupted: dict[str, Path]) -> None:
    for state in STATES:
        with tempfile.TemporaryDirectory() as name:  # others must get there, too
            place = Path(name) / "runs"
            shutil.copytree(interrupted[state], place)
            for path in place.rglob("*"):
                path.chmod(0o555 if path.is_dir() else 0o444)
            Path(name).chmod(0o755)
            before = names(place)
            with stranger(place):
                for asked in ("run.parquet", "run.parquet.parts"):
                    assert_reads_right(place / asked)
            assert names(place) == before
            for path in place.rglob("*"):
                path.chmod(0o755)


def no_room(_: Path) -> Callable[[], object]:
    """Have the file system take no more than the first bytes of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def other_process(place: Path, **changes: object) -> Callable[[], object]:
    """Have the run be that of another process than the one that was killed."""
    file = place / "run.parquet.parts" / "run.json"
    facts = json.loads(file.read_text())
    facts["process"] |= changes
    file.write_text(json.dumps(facts))
    return lambda: None


def other_owner(_: Path) -> Callable[[], object]:
    owner = os.geteuid()
    patched = pytest.MonkeyPatch()
    patched.setattr(os, "geteuid", lambda: owner + 1)
    return patched.undo


WHY_NOT: dict[str, Callable[[Path], Callable[[], object]]] = {
    "the files are somebody else's": other_owner,
    "the writer was on another machine": lambda place: other_process(place, host="elsewhere"),
    "the writer lives, and nothing can be locked": lambda place: other_process(place, **this_process(), locked=False),
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_what_must_not_be_repaired_is_read_as_it_is(tmp_path: Path, interrupted: dict[str, Path], why: str) -> None:
    for state in STATES:
        place = tmp_path / state
        shutil.copytree(interrupted[state], place)
        undo = WHY_NOT[why](place)
        try:
            assert_reads_right(place / "run.parquet")
        finally:
            undo()
        assert names(place) == names(interrupted[state])


def test_a_run_that_finds_no_room_for_its_repair_stays_in_its_parts(
    tmp_path: Path, interrupted: dict[str, Path]
) -> None:
    for state in STATES[:2]:
        place = tmp_path / state
        shutil.copytree(interrupted[state], place)
        room = no_room(place)
        try:
            assert_reads_right(place / "run.parquet")
        finally:
            room()
        assert {*names(interrupted[state])} - {*names(place)} == {"run.parquet.parts/merged.parquet.tmp"}
        assert_reads_right(place / "run.parquet")


def test_the_parts_of_another_run_are_not_taken_for_leftovers(tmp_path: Path) -> None:
    killed = RunWriter(tmp_path / "run.parquet", RunInfo("killed"))
    killed.write(batch_of_records([Record(0, 0, "forward", "output", "")]))
    killed.close_parts(RunInfo("killed", end="signal SIGTERM"))
    other_process(tmp_path, pid=2**22 + 1)  # there is no such process
    other = RunWriter(tmp_path / "other.parquet", RunInfo("other"))
    other.finish(RunInfo("other", end="completed"))
    (tmp_path / "other.parquet").rename(tmp_path / "run.parquet")  # by hand, to the wrong place
    before = names(tmp_path)
    with open_run(tmp_path / "run.parquet") as run:
        assert run.info.run_id == "other"
    assert names(tmp_path) == before
    (tmp_path / "run.parquet").unlink()
    with open_run(tmp_path / "run.parquet") as run:
        assert (run.info.run_id, run.end, run.info.records) == ("killed", "signal SIGTERM", 1)


@pytest.mark.parametrize("state", STATES[1::2])
def test_a_merge_that_goes_on_is_left_alone(tmp_path: Path, state: str) -> None:
    process = merging_process(signal.SIGSTOP, f"{tmp_path / 'run.parquet'}:{state}:")
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        before = names(tmp_path)
        for name in ("run.parquet", "run.parquet.parts"):
            assert_reads_right(tmp_path / name)
        assert names(tmp_path) == before
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0
    assert names(tmp_path) == ["run.parquet"]
    assert_reads_right(tmp_path / "run.parquet")


def test_ranks_are_repaired_each_by_itself(tmp_path: Path) -> None:
    kill(f"{tmp_path / 'run'}:half written:0", f"{tmp_path / 'run'}:parts half removed:1")
    for _ in range(2):
        with open_run(tmp_path / "run") as run:
            counts = run.execute("SELECT rank, count(*) FROM records GROUP BY 1 ORDER BY 1").fetchall()
            assert [info.rank for info in run.infos] == [0, 1]
            assert run.missing == []
        assert sum(count for _, count in counts) == 2 * 3 * STEPS
        assert names(tmp_path) == ["run", "run/_launch.json", "run/rank-0.parquet", "run/rank-1.parquet"]
