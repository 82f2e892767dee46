"""A second recording at the same place: whatever the first one is doing, rows of two runs never mix."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from gradtrace.analysis.run import open_run
from gradtrace.errors import RunExistsError, RunNotFoundError
from gradtrace.trace import process as process_module
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.lock import Hold, is_held
from gradtrace.trace.place import claim
from gradtrace.trace.process import is_alive, this_process
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

COMMON = """
    import os, signal, sys, time
    from pathlib import Path
    from gradtrace.errors import RunExistsError
    from gradtrace.trace import place, writer as writer_module
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.schema import Record
    from gradtrace.trace.writer import RunWriter

    path = Path(sys.argv[1])

    def write(writer, steps, name):
        for step in range(*steps):
            writer.write(batch_of_records([Record(step, step, "forward", "output", name)]))

    def stop(*_):
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def start(code: str, path: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMMON) + textwrap.dedent(code), str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen([*words, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True)


def steps_by_module(path: Path) -> dict[str, list[int]]:
    """Return the steps that each writer has written of a run; a writer gives its name to a module."""
    with open_run(path) as run:
        rows = run.execute("SELECT module, list(step ORDER BY seq) FROM records GROUP BY 1").fetchall()
    return dict(rows)


def write(writer: RunWriter, name: str, steps: int) -> None:
    for step in range(steps):
        writer.write(batch_of_records([Record(step, step, "forward", "output", name)]))


MERGES = """
    writer = RunWriter(path, RunInfo("first"), rows_per_part=4)
    write(writer, [10], "first")
    if sys.argv[2] == "merge":
        merge = writer_module.merge
        writer_module.merge = lambda *arguments: (stop(), merge(*arguments))
    else:
        remove = writer_module.remove_parts
        writer_module.remove_parts = lambda parts: (stop(), remove(parts))
    writer.finish(RunInfo("first", end="completed"))
"""


@pytest.mark.parametrize("moment", ["merge", "removal"])
def test_a_run_that_is_being_merged_is_refused_like_one_that_is_being_recorded(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "run.parquet"
    with start(MERGES, path, moment) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        before = sorted(tmp_path.rglob("*"))
        try:
            for existing in ("refuse", "overwrite", "move_aside"):
                with pytest.raises(RunExistsError, match=f"is being recorded by process {process.pid}; pass -o"):
                    RunWriter(path, RunInfo("second"), existing=existing)  # type: ignore[arg-type]
            assert sorted(tmp_path.rglob("*")) == before
        finally:
            process.send_signal(signal.SIGCONT)
    assert process.returncode == 0
    assert steps_by_module(path) == {"first": list(range(10))}
    second = RunWriter(path, RunInfo("second"), existing="move_aside")
    write(second, "second", 3)
    second.finish(RunInfo("second", end="completed"))
    assert steps_by_module(path) == {"second": [0, 1, 2]}
    assert steps_by_module(tmp_path / "run.1.parquet") == {"first": list(range(10))}
    assert sorted(os.listdir(tmp_path)) == ["run.1.parquet", "run.parquet"]


AT_ONCE = """
    name, existing, end = sys.argv[2:]
    real = Hold = place.Hold
    def slow(directory):  # so that they surely meet
        time.sleep(0.02)
        return real(directory)
    place.Hold = slow
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        writer = RunWriter(path, RunInfo(name), rows_per_part=4, existing=existing)
    except RunExistsError as error:
        print("refused", flush=True)
        sys.exit(0)
    print("recording", flush=True)
    write(writer, [25], name)
    sys.stdin.readline()
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    writer.finish(RunInfo(name, end="completed"))
"""


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_of_several_that_start_in_the_same_instant_one_records_and_the_others_are_refused(
    tmp_path: Path, end: str
) -> None:
    path = tmp_path / "run.parquet"
    kinds = ("refuse", "overwrite", "move_aside", "move_aside")
    processes = [start(AT_ONCE, path, f"w{number}", kind, end) for number, kind in enumerate(kinds)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4  # type: ignore[union-attr]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.stdout.readline() for process in processes]  # type: ignore[union-attr]
    assert Counter(said) == {"recording\n": 1, "refused\n": 3}
    for process in processes:
        process.communicate("\n")
    winner = said.index("recording\n")
    assert steps_by_module(path) == {f"w{winner}": list(range(25))}
    assert os.listdir(tmp_path) == ["run.parquet" if end == "finished" else "run.parquet.parts"]
    assert processes[winner].returncode == (0 if end == "finished" else -signal.SIGKILL)


DIES_IN_CLAIM = """
    where, existing = sys.argv[2:4]
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    def after(owner, name, wanted):
        function = getattr(owner, name)
        def call(self, *arguments, **options):
            result = function(self, *arguments, **options)
            if wanted in str(self):
                die()
            return result
        setattr(owner, name, call)
    if where == "made":
        after(Path, "mkdir", ".parts.tmp")
    elif where == "facts":
        after(Path, "write_text", "run.json")
    elif where == "born":
        after(Path, "rename", ".parts.tmp")
    else:  # on the way of the older run, aside or off the disk
        after(Path, "unlink" if existing == "overwrite" else "rename", str(path))
    RunWriter(path, RunInfo("killed", rank=0, world_size=int(sys.argv[4])), existing=existing)
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("where", ["made", "facts", "born"])
def test_whoever_is_killed_while_it_takes_its_place_is_in_nobodys_way(tmp_path: Path, where: str, ranks: str) -> None:
    path = tmp_path / "run.parquet"
    with start(DIES_IN_CLAIM, path, where, "refuse", ranks) as process:
        pass
    assert process.returncode == -signal.SIGKILL
    if where == "born":
        with open_run(path) as run:
            assert (run.end, run.steps) == ("killed", 0)
            assert run.missing[-1].endswith("the run was killed before a step was recorded")
    elif ranks == "1":
        with pytest.raises(RunNotFoundError, match="no such file"):
            open_run(path)
    info = RunInfo("next", world_size=int(ranks))
    following = RunWriter(path, info, existing="move_aside")
    assert (following.moved_to is None) == (where != "born" and ranks == "1")
    write(following, "next", 2)
    following.finish(info)
    assert steps_by_module(path) == {"next": [0, 1]}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("existing", ["overwrite", "move_aside"])
def test_whoever_is_killed_while_it_makes_room_leaves_the_older_run_whole_or_none(
    tmp_path: Path, existing: str
) -> None:
    path = tmp_path / "run.parquet"
    older = RunWriter(path, RunInfo("older"), rows_per_part=4)
    write(older, "older", 10)
    older.close_parts(RunInfo("older", end="exit 1"))
    with start(DIES_IN_CLAIM, path, "older", existing, "1") as process:
        pass
    assert process.returncode == -signal.SIGKILL
    if existing == "move_aside":
        assert steps_by_module(tmp_path / "run.1.parquet") == {"older": list(range(10))}
    following = RunWriter(path, RunInfo("next"), existing=existing)  # type: ignore[arg-type]
    write(following, "next", 2)
    following.finish(RunInfo("next", end="completed"))
    assert steps_by_module(path) == {"next": [0, 1]}
    there = ["run.1.parquet.parts", "run.parquet"] if existing == "move_aside" else ["run.parquet"]
    assert sorted(os.listdir(tmp_path)) == there


BECOMES_ANOTHER = """
    writer = RunWriter(path, RunInfo("first"))
    write(writer, [3], "first")
    os.execvp("sleep", ["sleep", "60"])
"""
FORKS = """
    writer = RunWriter(path, RunInfo("first"))
    write(writer, [3], "first")
    if os.fork() == 0:
        print("child", flush=True)
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_has_become_another_program_records_no_more(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    with start(BECOMES_ANOTHER, path) as process:
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert process.poll() is None
        with open_run(path) as run:
            assert (run.end, run.info.last_step) == ("killed", 2)
            assert run.missing == ["the step after 2 was in flight when the run was killed"]
        following = RunWriter(path, RunInfo("next"), existing="move_aside")
        following.finish(RunInfo("next", end="completed"))
        process.kill()
    assert steps_by_module(tmp_path / "run.1.parquet") == {"first": [0, 1, 2]}


def test_a_child_that_outlives_a_killed_run_does_not_hold_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    process = start(FORKS, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "child\n"
    assert process.wait(60) == -signal.SIGKILL
    assert is_held(tmp_path / "run.parquet.parts") is False
    RunWriter(path, RunInfo("next"), existing="move_aside").finish(RunInfo("next", end="completed"))
    assert steps_by_module(tmp_path / "run.1.parquet") == {"first": [0, 1, 2]}
    process.stdout.close()
    process.stdin.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("ends", ["finish", "close_parts", "failed finish"])
def test_a_run_that_has_ended_makes_way_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    path = tmp_path / "run.parquet"
    first = RunWriter(path, RunInfo("first"))
    write(first, "first", 4)
    info = RunInfo("first", end="completed")
    if ends == "failed finish":

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            first.finish(info)
        monkeypatch.undo()
    else:
        getattr(first, ends)(info)
    second = RunWriter(path, RunInfo("second"), existing="move_aside")
    write(second, "second", 2)
    second.finish(RunInfo("second", end="completed"))
    assert steps_by_module(path) == {"second": [0, 1]}
    assert steps_by_module(tmp_path / "run.1.parquet") == {"first": [0, 1, 2, 3]}


def test_what_a_killed_rank_had_not_finished_is_no_reason_to_refuse_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for rank in (0, 1):
        info = RunInfo("first", rank=rank, world_size=2, end="completed")
        RunWriter(path, info).finish(info)
    (path / ".rank-0.capsule.pt.4711.tmp").write_bytes(b"half")
    info = RunInfo("second", world_size=2)
    assert RunWriter(path, info, existing="move_aside").moved_to == tmp_path / "run.1"


def test_a_rank_that_is_recorded_keeps_another_launch_from_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    dead = RunWriter(path, RunInfo("first", rank=0, world_size=2))
    dead.close_parts(RunInfo("first", rank=0, world_size=2, end="signal SIGTERM"))
    live = RunWriter(path, RunInfo("first", rank=1, world_size=2))
    for existing in ("refuse", "overwrite", "move_aside"):
        with pytest.raises(RunExistsError, match=f"is being recorded by process {os.getpid()}"):
            RunWriter(path, RunInfo("second", world_size=2), existing=existing)  # type: ignore[arg-type]
    live.finish(RunInfo("first", rank=1, world_size=2, end="completed"))
    assert RunWriter(path, RunInfo("second", world_size=2), existing="move_aside").moved_to == tmp_path / "run.1"


def test_where_nothing_can_be_locked_process_and_end_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    path = tmp_path / "run.parquet"
    writer = RunWriter(path, RunInfo("first"))
    assert json.loads((tmp_path / "run.parquet.parts" / "run.json").read_text())["process"]["locked"] is False
    with pytest.raises(RunExistsError, match="is being recorded"):
        claim(path, RunInfo("second"), "move_aside")
    with open_run(path) as run:
        assert run.end == "running"
    writer.close_parts(RunInfo("first", end="exit 1"))
    assert claim(path, RunInfo("second"), "move_aside").moved_to == tmp_path / "run.1.parquet"


@pytest.mark.parametrize("locked", [True, False])
def test_a_process_of_another_container_is_not_taken_for_dead(tmp_path: Path, locked: bool) -> None:
    # Both are process 1 of a host of the same name, and see the same directory.
    path = tmp_path / "run.parquet"
    writer = RunWriter(path, RunInfo("first"))
    write(writer, "first", 1)
    facts = tmp_path / "run.parquet.parts" / "run.json"
    values = json.loads(facts.read_text())
    values["process"] |= {"pid": 1, "space": "pid:[1]", "started": 1, "locked": locked}
    facts.write_text(json.dumps(values))
    with open_run(path) as run:
        if locked:
            assert (run.end, run.missing) == (
                "running",
                ["the run is still being recorded; this is what there is up to step 0"],
            )
        else:
            assert run.end == "killed"
            assert run.missing[0].startswith("the run may still go on, on ")
    if locked:
        with pytest.raises(RunExistsError, match="is being recorded by process 1;"):
            claim(path, RunInfo("second"), "move_aside")


def test_a_process_that_the_system_tells_nothing_of_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    # /proc mounted with hidepid, the process somebody else's.
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = this_process()
    assert is_alive(process) is True
    monkeypatch.setattr(os, "kill", refuse)
    assert is_alive(process) is True
    monkeypatch.setattr(process_module, "_start_time", lambda pid: None)
    assert is_alive(process) is None


@pytest.mark.parametrize("pid", [2**70, 2**31, 0, -1, "1", None])
def test_a_number_that_no_process_can_have_is_of_none(pid: object) -> None:
    assert is_alive(this_process() | {"pid": pid}) is False


def test_a_script_that_closes_all_descriptors_loses_no_file_of_its_own_to_the_lock(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    hold = Hold(tmp_path / "held")
    descriptor = hold._directory.number
    os.close(descriptor)
    with open(tmp_path / "own", "w") as own:
        assert own.fileno() == descriptor
        hold.release()
        own.write("whole")
    assert (tmp_path / "own").read_text() == "whole"
