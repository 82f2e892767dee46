"""RunWriter: what it writes is all there, whenever and however the process ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradtrace.analysis.run import open_run
from gradtrace.errors import CaptureError, RunExistsError
from gradtrace.trace import merging
from gradtrace.trace import writer as writer_module
from gradtrace.trace.arrow import ARROW_SCHEMA, batch_of_records
from gradtrace.trace.journal import Journal, read_journal
from gradtrace.trace.parts import pieces
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

COMPLETED = RunInfo("r", end="completed")


def rows_of_step(step: int, count: int = 3) -> list[Record]:
    return [Record(step, step * count + n, "forward", "output", f"layer.{n}", max=step + n / 4) for n in range(count)]


def write_steps(writer: RunWriter, steps: range) -> None:
    for step in steps:
        writer.write(batch_of_records(rows_of_step(step)))


def read_rows(path: Path) -> list[tuple[int, int, str, float]]:
    with open_run(path) as run:
        return run.execute("SELECT step, seq, module, max FROM records ORDER BY seq").fetchall()


def expected(steps: range) -> list[tuple[int, int, str | None, float | None]]:
    return [(row.step, row.seq, row.module, row.max) for step in steps for row in rows_of_step(step)]


def test_the_schema_of_the_file_is_exactly_this(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write_steps(writer, range(1))
    writer.finish(COMPLETED)
    file = pq.ParquetFile(tmp_path / "run.parquet")
    name = "dictionary<values=string, indices=int32, ordered=0>"
    assert [(field.name, str(field.type)) for field in file.schema_arrow] == [
        ("rank", "int32"),
        ("step", "int64"),
        ("micro_step", "int32"),
        ("seq", "int64"),
        ("time", "timestamp[us, tz=UTC]"),
        ("phase", name),
        ("module", name),
        ("call", "int32"),
        ("tensor", name),
        ("path", name),
        ("dtype", name),
        ("shape", name),
        ("device", name),
        ("numel", "int64"),
        ("nan_count", "int64"),
        ("posinf_count", "int64"),
        ("neginf_count", "int64"),
        ("min", "double"),
        ("max", "double"),
        ("norm", "double"),
        ("op", name),
        ("file", name),
        ("line", "int32"),
        ("detail", name),
    ]


def test_columns_are_compressed_as_designed(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write_steps(writer, range(2))
    writer.finish(COMPLETED)
    group = pq.ParquetFile(tmp_path / "run.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["norm"].encodings
    assert "RLE_DICTIONARY" in columns["module"].encodings
    assert "RLE_DICTIONARY" in columns["nan_count"].encodings


def test_the_finished_run_is_one_file_with_the_facts_in_its_metadata(tmp_path):
    path = tmp_path / "run.parquet"
    writer = RunWriter(path, RunInfo("r", command=["train.py"]), rows_per_part=7)
    write_steps(writer, range(10))
    writer.finish(RunInfo("r", command=["train.py"], end="exit 3", steps=10))
    assert os.listdir(tmp_path) == ["run.parquet"]
    info = RunInfo.from_json(pq.read_metadata(path).metadata[METADATA_KEY], "x")
    assert (info.command, info.end, info.steps, info.records) == (["train.py"], "exit 3", 10, 30)
    assert writer.path == writer.run_path == path
    assert writer.bytes_written == path.stat().st_size


def test_many_parts_are_merged_in_order_into_even_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "ROWS_PER_GROUP", 8)
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=5)
    write_steps(writer, range(21))
    writer.finish(COMPLETED)
    table = pq.read_table(tmp_path / "run.parquet")
    assert table["seq"].to_pylist() == list(range(63))
    assert table["module"].to_pylist() == [f"layer.{n % 3}" for n in range(63)]
    metadata = pq.read_metadata(tmp_path / "run.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [8] * 7 + [7]


def test_a_run_without_rows_is_a_run(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    writer.finish(COMPLETED)
    assert pq.read_table(tmp_path / "run.parquet").num_rows == 0
    assert read_rows(tmp_path / "run.parquet") == []


def test_rows_out_of_order_are_refused(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write_steps(writer, range(2))
    with pytest.raises(ValueError, match="order of seq"):
        writer.write(batch_of_records(rows_of_step(1)))
    with pytest.raises(ValueError, match="order of seq"):
        writer.write(batch_of_records(reversed(rows_of_step(5))))
    writer.finish(COMPLETED)
    assert read_rows(tmp_path / "run.parquet") == expected(range(2))


def test_every_row_is_with_the_operating_system_when_write_returns(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    for step in range(3):
        write_steps(writer, range(step, step + 1))
        journal = tmp_path / "run.parquet.parts" / "journal-000000.arrow"
        assert read_journal(journal).num_rows == 3 * (step + 1)
        assert writer.bytes_written == journal.stat().st_size
    writer.finish(COMPLETED)


def test_norms_are_kept_to_the_precision_that_they_have(tmp_path):
    third = 1 / 3
    kinds = ["float32", "bfloat16", "float64", "int64", None]
    rows = [Record(0, n, "forward", "output", dtype=kind, norm=third) for n, kind in enumerate(kinds)]
    outside = [5e300, 1e-300, 0.0, None, 2.0**-149, 65504.0]
    rows += [Record(0, 10 + n, "forward", "output", dtype="float32", norm=value) for n, value in enumerate(outside)]
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    writer.write(batch_of_records(rows))
    in_the_journal = read_norms(tmp_path / "run.parquet")
    writer.finish(COMPLETED)
    found = read_norms(tmp_path / "run.parquet")
    assert found == in_the_journal
    single = struct.unpack("f", struct.pack("f", third))[0]
    assert single != third
    assert found[: len(kinds)] == [single, single, third, third, third]
    rounded = found[len(kinds) :]
    assert rounded == [pytest.approx(value, rel=2**-24) if value else value for value in outside]
    assert [value == exact for value, exact in zip(rounded, outside, strict=True)] == [False, False, *[True] * 4]


def read_norms(path: Path) -> list[float | None]:
    with open_run(path) as run:
        return [norm for (norm,) in run.execute("SELECT norm FROM records ORDER BY seq").fetchall()]


def test_a_joined_part_counts_before_what_was_put_into_it(tmp_path):
    names = [
        "part-000000.parquet",
        "journal-000001.arrow",  # has just been encoded
        "part-000001.parquet",
        "part-000002-000005.parquet",
        "part-000002-000003.parquet",  # what the last one was made of
        "part-000004.parquet",
        "part-000005.parquet",
        "part-000006.tmp",
        "part-000008.parquet",
        "journal-000009.arrow",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in pieces(tmp_path)] == [
        "part-000000.parquet",
        "part-000001.parquet",
        "part-000002-000005.parquet",
        "part-000008.parquet",
        "journal-000009.arrow",
    ]


def test_update_replaces_the_facts(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write_steps(writer, range(2))
    writer.update(RunInfo("r", notes=["n"]))
    values = json.loads((tmp_path / "run.parquet.parts" / "run.json").read_text())
    assert (values["notes"], values["records"], values["process"]["pid"]) == (["n"], 6, os.getpid())
    assert sorted(os.listdir(tmp_path / "run.parquet.parts")) == [
        "journal-000000.arrow",
        "journal-000000.crc",
        "reserve.tmp",
        "run.json",
    ]
    writer.finish(COMPLETED)


def test_close_parts_leaves_a_readable_run_that_says_how_it_ended(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=6)
    write_steps(writer, range(5))
    writer.close_parts(RunInfo("r", end="signal SIGTERM"))
    assert not (tmp_path / "run.parquet").exists()
    assert read_rows(tmp_path / "run.parquet") == expected(range(5))
    with open_run(tmp_path / "run.parquet") as run:
        assert (run.end, run.steps, run.missing) == ("signal SIGTERM", 5, [])
    with pytest.raises(ValueError, match="closed"):
        write_steps(writer, range(5, 6))
    writer.finish(COMPLETED)
    assert not (tmp_path / "run.parquet").exists()


KILLED = """
    import sys
    from test_writer import rows_of_step
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.writer import RunWriter

    writer = RunWriter(sys.argv[1], RunInfo("r"), rows_per_part=10)
    for step in range(10_000_000):
        writer.write(batch_of_records(rows_of_step(step)))
        print(step, flush=True)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_kill_9_loses_no_step_whose_write_has_returned(tmp_path):
    process = start(KILLED, tmp_path / "run.parquet")
    assert process.stdout is not None
    while process.stdout.readline() != "40\n":
        pass
    process.send_signal(signal.SIGKILL)
    told = [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    process.wait()
    last = told[-1] if told else 40
    rows = read_rows(tmp_path / "run.parquet")
    assert rows == expected(range(len(rows) // 3))
    assert last <= rows[-1][0] <= last + 1
    with open_run(tmp_path / "run.parquet") as run:
        assert run.end == "killed"
        assert (run.steps, run.info.last_step) == (rows[-1][0] + 1, rows[-1][0])
        assert run.missing == [f"the step after {rows[-1][0]} was in flight when the run was killed"]


def test_a_killed_process_is_not_alive_even_before_it_is_reaped(tmp_path):
    process = start(KILLED, tmp_path / "run.parquet")
    assert process.stdout is not None
    process.stdout.readline()
    with open_run(tmp_path / "run.parquet") as run:
        assert run.end == "running"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with open_run(tmp_path / "run.parquet") as run:
        assert run.end == "killed"
    process.stdout.close()
    process.wait()


def test_a_journal_cut_off_anywhere_reads_up_to_the_last_whole_step(tmp_path):
    journal = Journal(tmp_path / "whole.arrow")
    ends = []
    for step in range(3):
        journal.append(batch_of_records(rows_of_step(step)))
        ends.append(journal.bytes)
    journal.close()
    data = (tmp_path / "whole.arrow").read_bytes()
    assert ends[-1] == len(data)
    cut = tmp_path / "cut.arrow"
    for length in range(len(data) + 1):
        cut.write_bytes(data[:length])
        whole = sum(length >= end for end in ends)
        table = read_journal(cut)
        assert table.schema == ARROW_SCHEMA
        assert table["seq"].to_pylist() == list(range(3 * whole)), f"cut at byte {length}"
        assert table["module"].to_pylist() == [f"layer.{n % 3}" for n in range(3 * whole)]


def test_a_cut_off_journal_in_the_middle_of_a_run_costs_only_its_end(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=3)
    write_steps(writer, range(2))
    write_steps(writer, range(2, 4))
    writer.close_parts(RunInfo("r"))
    parts = tmp_path / "run.parquet.parts"
    (parts / "journal-000009.arrow").write_bytes(b"")
    (parts / "part-000008.tmp").write_bytes(b"half")
    assert read_rows(parts) == expected(range(4))


def test_a_step_that_cannot_be_written_ends_its_journal_and_nothing_else(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write_steps(writer, range(2))
    journal = tmp_path / "run.parquet.parts" / "journal-000000.arrow"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            write_steps(writer, range(2, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_rows(tmp_path / "run.parquet") == expected(range(2))
    write_steps(writer, range(2, 4))
    writer.finish(COMPLETED)
    assert read_rows(tmp_path / "run.parquet") == expected(range(4))


def test_a_failing_encoder_is_told_and_loses_nothing(tmp_path, monkeypatch):
    def broken(directory: Path, index: int) -> None:
        raise OSError("encoder broke")

    monkeypatch.setattr(writer_module, "encode", broken)
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=3)
    with pytest.raises(OSError, match="encoder broke"):
        write_steps(writer, range(50))
    written = read_rows(tmp_path / "run.parquet")
    assert written == expected(range(len(written) // 3))
    assert written
    writer.finish(COMPLETED)
    assert read_rows(tmp_path / "run.parquet") == written


def test_a_merge_that_fails_leaves_the_run_in_its_parts(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=6)
    write_steps(writer, range(5))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        writer.finish(COMPLETED)
    assert not (tmp_path / "run.parquet").exists()
    assert not (tmp_path / "run.parquet.parts" / "merged.parquet.tmp").exists()
    assert read_rows(tmp_path / "run.parquet") == expected(range(5))
    with open_run(tmp_path / "run.parquet") as run:
        assert (run.end, run.missing) == ("completed", [])


def test_a_forked_child_writes_nothing_and_breaks_nothing(tmp_path):
    code = """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from test_writer import write_steps
        from gradtrace.trace.runinfo import RunInfo
        from gradtrace.trace.writer import RunWriter

        writer = RunWriter(sys.argv[1], RunInfo("r"), rows_per_part=6)
        write_steps(writer, range(3))
        child = os.fork()
        if child == 0:
            write_steps(writer, range(3, 9))
            writer.update(RunInfo("r", end="child"))
            writer.close_parts(RunInfo("r", end="child"))
            writer.finish(RunInfo("r", end="child"))
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        write_steps(writer, range(3, 5))
        writer.finish(RunInfo("r", end="completed"))
    """
    process = start(code, tmp_path / "run.parquet")
    out, _ = process.communicate()
    assert (out, process.returncode) == ("7\n", 0)
    assert read_rows(tmp_path / "run.parquet") == expected(range(5))


def finished(path: Path, steps: int = 1) -> None:
    writer = RunWriter(path, RunInfo("old"))
    write_steps(writer, range(steps))
    writer.finish(RunInfo("old", end="completed"))


def test_an_older_run_is_not_replaced_unasked(tmp_path):
    finished(tmp_path / "run.parquet")
    with pytest.raises(RunExistsError) as error:
        RunWriter(tmp_path / "run.parquet", RunInfo("new"))
    assert "--force" in str(error.value)
    assert "overwrite=True" in str(error.value)
    assert "-o" in str(error.value)
    assert read_rows(tmp_path / "run.parquet") == expected(range(1))
    assert os.listdir(tmp_path) == ["run.parquet"]


def test_overwrite_replaces_it(tmp_path):
    finished(tmp_path / "run.parquet")
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("new"), existing="overwrite")
    write_steps(writer, range(2))
    writer.finish(COMPLETED)
    assert writer.moved_to is None
    assert os.listdir(tmp_path) == ["run.parquet"]
    assert read_rows(tmp_path / "run.parquet") == expected(range(2))


def test_move_aside_keeps_every_older_run(tmp_path):
    for steps in (1, 2, 3):
        writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), existing="move_aside")
        assert writer.moved_to == (tmp_path / f"run.{steps - 1}.parquet" if steps > 1 else None)
        write_steps(writer, range(steps))
        writer.finish(COMPLETED)
    found = {path.name: len(read_rows(path)) for path in tmp_path.iterdir()}
    assert found == {"run.1.parquet": 3, "run.2.parquet": 6, "run.parquet": 9}


def test_the_parts_of_a_killed_run_are_an_older_run(tmp_path):
    path = tmp_path / "run.parquet"
    old = RunWriter(path, RunInfo("old"))
    write_steps(old, range(2))
    old.close_parts(RunInfo("old", end="signal SIGTERM"))
    with pytest.raises(RunExistsError):
        RunWriter(path, RunInfo("new"))
    new = RunWriter(path, RunInfo("new"), existing="move_aside")
    new.finish(COMPLETED)
    assert new.moved_to == tmp_path / "run.1.parquet"
    assert sorted(os.listdir(tmp_path)) == ["run.1.parquet.parts", "run.parquet"]
    assert read_rows(tmp_path / "run.1.parquet") == expected(range(2))
    RunWriter(path, RunInfo("newer"), existing="overwrite").finish(COMPLETED)
    assert sorted(os.listdir(tmp_path)) == ["run.1.parquet.parts", "run.parquet"]


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "move_aside"])
def test_a_run_that_is_being_recorded_is_left_alone(tmp_path, existing):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write_steps(writer, range(1))
    with pytest.raises(RunExistsError, match=f"being recorded by process {os.getpid()}"):
        RunWriter(tmp_path / "run.parquet", RunInfo("other"), existing=existing)
    write_steps(writer, range(1, 3))
    writer.finish(COMPLETED)
    assert read_rows(tmp_path / "run.parquet") == expected(range(3))


@pytest.mark.parametrize("existing", ["overwrite", "move_aside"])
def test_a_directory_of_other_things_is_never_touched(tmp_path, existing):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("x")
    with pytest.raises(RunExistsError, match="is a directory that is no run"):
        RunWriter(tmp_path / "data", RunInfo("r"), existing=existing)
    assert (tmp_path / "data" / "precious.txt").read_text() == "x"


def test_a_place_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"cannot write .*run.parquet: "):
        RunWriter(tmp_path / "file" / "run.parquet", RunInfo("r"))


def test_missing_directories_are_made(tmp_path):
    RunWriter(tmp_path / "a" / "b" / "run.parquet", RunInfo("r")).finish(COMPLETED)
    assert read_rows(tmp_path / "a" / "b" / "run.parquet") == []


def test_a_later_chdir_does_not_move_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = RunWriter("run.parquet", RunInfo("r"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_steps(writer, range(1))
    writer.finish(COMPLETED)
    assert writer.path == tmp_path / "run.parquet"
    assert read_rows(writer.path) == expected(range(1))


def rank_info(rank: int, run_id: str = "launch", **facts: object) -> RunInfo:
    return RunInfo(run_id, rank=rank, world_size=2, **facts)  # type: ignore[arg-type]


def test_several_ranks_share_a_directory(tmp_path):
    writers = [RunWriter(tmp_path / "run.parquet", rank_info(rank)) for rank in (1, 0)]
    for writer in writers:
        write_steps(writer, range(1))
    for writer, rank in zip(writers, (1, 0), strict=True):
        writer.finish(rank_info(rank, end="completed"))
    assert {writer.run_path for writer in writers} == {tmp_path / "run.parquet"}
    assert writers[0].path == tmp_path / "run.parquet" / "rank-1.parquet"
    names = sorted(os.listdir(tmp_path / "run.parquet"))
    assert names == ["_launch.json", "rank-0.parquet", "rank-1.parquet"]
    assert os.listdir(tmp_path) == ["run.parquet"]


def test_a_restarted_launch_writes_beside_its_earlier_attempt(tmp_path):
    for attempt in (0, 1):
        writer = RunWriter(tmp_path / "run", rank_info(0, attempt=attempt))
        writer.finish(rank_info(0, attempt=attempt, end="completed"))
    names = sorted(os.listdir(tmp_path / "run"))
    assert names == ["_launch.json", "rank-0.attempt-1.parquet", "rank-0.parquet"]


def test_another_launch_moves_the_whole_directory_aside_once(tmp_path):
    for run_id in ("first", "second"):
        for rank in (0, 1):
            info = rank_info(rank, run_id, end="completed")
            writer = RunWriter(tmp_path / "run.parquet", info, existing="move_aside")
            assert writer.moved_to == (tmp_path / "run.1.parquet" if run_id == "second" else None)
            writer.finish(info)
    assert sorted(os.listdir(tmp_path)) == ["run.1.parquet", "run.parquet"]
    for name, run_id in (("run.1.parquet", "first"), ("run.parquet", "second")):
        with open_run(tmp_path / name) as run:
            assert [info.run_id for info in run.infos] == [run_id, run_id]


RANK = """
    import sys
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.writer import RunWriter

    info = RunInfo("new", rank=int(sys.argv[2]), world_size=4, end="completed")
    print("ready", flush=True)
    sys.stdin.readline()
    writer = RunWriter(sys.argv[1], info, existing="move_aside")
    writer.finish(info)
"""


def test_ranks_that_start_at_the_same_time_move_one_older_run_aside_together(tmp_path):
    finished(tmp_path / "run.parquet", steps=2)
    command = [sys.executable, "-c", textwrap.dedent(RANK), str(tmp_path / "run.parquet")]
    ranks = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in range(4)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    for rank in ranks:
        rank.communicate()
        assert rank.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["run.1.parquet", "run.parquet"]
    assert len(read_rows(tmp_path / "run.1.parquet")) == 6
    names = [f"rank-{n}.parquet" for n in range(4)]
    assert sorted(os.listdir(tmp_path / "run.parquet")) == ["_launch.json", *names]


def test_a_foreign_schema_is_refused(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    with pytest.raises((pa.ArrowInvalid, KeyError)):
        writer.write(pa.RecordBatch.from_pydict({"seq": [1]}))
    writer.finish(COMPLETED)
