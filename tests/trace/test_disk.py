"""A place that takes no more: what a writer raises, what is left, and what those who read it are told."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradtrace.analysis.run import open_run
from gradtrace.errors import CaptureError
from gradtrace.trace import reserve as reserve_module
from gradtrace.trace import writer as writer_module
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.journal import Journal
from gradtrace.trace.reserve import RESERVE_FILE, Reserve
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.trouble import in_words
from gradtrace.trace.writer import RunWriter

STOPPED = RunInfo("r", end="tracer failed: the disk is full")


def write(writer: RunWriter, steps: range) -> None:
    for step in steps:
        rows = [Record(step, 3 * step + n, "forward", "output", f"layer.{n}", max=float(step)) for n in range(3)]
        writer.write(batch_of_records(rows))


def steps_of(path: Path) -> list[int]:
    with open_run(path) as run:
        return [step for (step,) in run.execute("SELECT DISTINCT step FROM records ORDER BY step").fetchall()]


@contextmanager
def refused(monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> Iterator[None]:
    """Have the operating system refuse some of what changes a file."""

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number), str(arguments[0]))

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, refuse)
        yield


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "the disk reports an input/output error"),
        (errno.EFBIG, "a file has reached the largest size that is allowed (ulimit -f)"),
        (errno.EMFILE, "the process has too many files open (ulimit -n)"),
        (errno.ENOENT, "the directory is gone: removed, moved or replaced"),
        (errno.ELOOP, "Too many levels of symbolic links"),
    ],
)
def test_the_reason_is_told_in_words(number: int, words: str) -> None:
    assert in_words(OSError(number, os.strerror(number), "x")) == words


def test_an_error_of_another_kind_is_told_in_its_own_words() -> None:
    assert in_words(OSError()) == "OSError"
    assert in_words(OSError("Error writing\nbytes")) == "Error writing bytes"


def test_a_step_that_does_not_fit_leaves_those_before_it_and_no_trace_of_itself(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(5))
    journal = tmp_path / "run.parquet.parts" / "journal-000000.arrow"
    whole = journal.read_bytes()
    with limited(len(whole) + 100), pytest.raises(OSError, match="large") as error:
        write(writer, range(5, 6))
    assert error.value.errno == errno.EFBIG
    assert journal.read_bytes() == whole
    writer.update(STOPPED)
    with open_run(tmp_path / "run.parquet") as run:
        assert run.missing == ["recording stopped after step 4: the disk is full; the training went on"]
    writer.finish(STOPPED)
    assert steps_of(tmp_path / "run.parquet") == list(range(5))


def test_checksums_that_are_written_in_two_goes_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_to = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write_to(fd, data[:5] if len(data) == 8 else data))
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(5))
    checksums = tmp_path / "run.parquet.parts" / "journal-000000.crc"
    assert checksums.stat().st_size == 5 * 8
    with open_run(tmp_path / "run.parquet") as run:
        assert run.damage == []
    writer.finish(STOPPED)
    assert steps_of(tmp_path / "run.parquet") == list(range(5))


def test_a_script_that_closes_all_files_has_none_of_its_own_written_to_or_closed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(2))
    parts = tmp_path / "run.parquet.parts"
    numbers = {int(link.name): link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()}
    ours = sorted(number for number, place in numbers.items() if place.is_relative_to(parts))
    assert len(ours) == 4  # the directory, the journal, its checksums, the room held back
    for number in ours:
        os.close(number)
    own = {os.open(tmp_path / f"own{number}", os.O_WRONLY | os.O_CREAT): tmp_path / f"own{number}" for number in ours}
    assert sorted(own) == ours
    with pytest.raises(OSError, match="Bad file descriptor") as error:
        write(writer, range(2, 3))
    assert in_words(error.value) == "its files have been closed by the script"
    writer.update(STOPPED)
    writer.finish(STOPPED)
    for number, path in own.items():
        os.write(number, b"whole")
        os.close(number)
        assert path.read_text() == "whole"
    assert steps_of(tmp_path / "run.parquet") == [0, 1]


def test_pieces_are_removed_when_none_of_them_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # NFS keeps a file that is open under another name, and a directory with one in it cannot be removed.
    def look(directory: Path) -> None:
        links = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
        seen.extend(place for place in links if place.parent == directory.resolve())
        remove(directory)

    seen: list[Path] = []
    remove = writer_module.remove_parts
    monkeypatch.setattr(writer_module, "remove_parts", look)
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=6)
    write(writer, range(5))
    writer.finish(STOPPED)
    assert seen == []
    assert os.listdir(tmp_path) == ["run.parquet"]


def test_a_first_step_that_does_not_fit_leaves_a_run_without_steps(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    with limited(1000), pytest.raises(OSError, match="large"):
        write(writer, range(1))
    writer.update(STOPPED)
    with open_run(tmp_path / "run.parquet") as run:
        assert run.missing == ["recording stopped before a step was recorded: the disk is full; the training went on"]
    writer.finish(STOPPED)
    assert steps_of(tmp_path / "run.parquet") == []


def test_that_it_stopped_is_noted_in_the_room_that_was_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(2))
    writer.update(RunInfo("r", notes=["n" * 50_000]))
    reserve = tmp_path / "run.parquet.parts" / RESERVE_FILE
    assert reserve.stat().st_size > 50_000
    assert reserve.stat().st_blocks * 512 > 50_000
    put = Path.write_text

    def full(self: Path, text: str, **more: Any) -> int:
        if reserve.exists():
            put(self, text[:100], **more)
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        writer.update(RunInfo("r", notes=["while it goes on, the room is kept"]))
    assert reserve.exists()
    assert [path for path in reserve.parent.iterdir() if path.name.startswith("run.json.")] == []
    writer.update(STOPPED)
    assert not reserve.exists()
    with open_run(tmp_path / "run.parquet") as run:
        assert (run.end, run.missing) == (
            STOPPED.end,
            ["recording stopped after step 1: the disk is full; the training went on"],
        )
    writer.finish(STOPPED)
    assert os.listdir(tmp_path) == ["run.parquet"]


def test_a_descriptor_is_held_back_too(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    reserve.hold(0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    taken = []
    try:
        with pytest.raises(OSError, match="Too many open files") as error:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert reserve.helps(error.value)
        assert not reserve.helps(error.value)
        (tmp_path / "last words").write_text("x")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_no_room_helps_against_keeps_the_room(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    reserve.hold(0)
    assert not reserve.helps(OSError(errno.EIO, "x"))
    assert (tmp_path / reserve_module.RESERVE_FILE).exists()
    reserve.give_back()
    reserve.give_back()
    assert os.listdir(tmp_path) == []


def test_where_no_file_can_be_made_the_end_is_noted_in_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(2))
    with refused(monkeypatch, errno.EACCES, "replace"):
        with pytest.raises(PermissionError):
            writer.update(RunInfo("r"))
        writer.update(STOPPED)
    with open_run(tmp_path / "run.parquet") as run:
        assert run.end == STOPPED.end
    writer.finish(STOPPED)


@pytest.mark.parametrize("where", ["the parts", "the directory above"])
def test_a_directory_that_was_removed_is_noticed_at_the_next_step(tmp_path: Path, where: str) -> None:
    writer = RunWriter(tmp_path / "runs" / "run.parquet", RunInfo("r"))
    write(writer, range(2))
    assert writer.is_in_place
    shutil.rmtree(tmp_path / "runs" / "run.parquet.parts" if where == "the parts" else tmp_path / "runs")
    with pytest.raises(FileNotFoundError):
        write(writer, range(2, 3))
    assert not writer.is_in_place
    with pytest.raises(FileNotFoundError):
        writer.finish(STOPPED)
    assert not writer.in_one_file


def test_another_run_in_the_same_place_is_never_mixed_with_this_one(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    old = RunWriter(path, RunInfo("old"), rows_per_part=30)
    write(old, range(3))
    shutil.rmtree(tmp_path / "run.parquet.parts")
    new = RunWriter(path, RunInfo("new"), rows_per_part=30)
    write(new, range(7))
    with pytest.raises(FileNotFoundError, match="replaced"):
        write(old, range(3, 30))
    for end in (old.update, old.close_parts):
        with pytest.raises(FileNotFoundError):
            end(STOPPED)
    write(new, range(7, 12))
    new.finish(RunInfo("new", end="completed"))
    with open_run(path) as run:
        assert (run.info.run_id, run.end, run.missing) == ("new", "completed", [])
    assert steps_of(path) == list(range(12))


def test_a_directory_that_cannot_be_looked_at_any_more_is_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(2))
    with refused(monkeypatch, errno.EACCES, "stat"):
        with pytest.raises(PermissionError):
            write(writer, range(2, 3))
        assert writer.is_in_place
    writer.finish(STOPPED)
    assert steps_of(tmp_path / "run.parquet") == [0, 1]


def test_a_part_that_cannot_be_encoded_ends_the_recording_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=15)
    write(writer, range(4))
    with refused(monkeypatch, errno.ENOSPC, "replace"), pytest.raises(OSError, match="No space"):
        write(writer, range(4, 1000))
    kept = steps_of(tmp_path / "run.parquet")
    assert kept == list(range(len(kept)))
    there = {path.name for path in (tmp_path / "run.parquet.parts").iterdir()}
    assert "journal-000000.arrow" in there
    assert not there & {"part-000000.parquet", "part-000000.tmp"}
    writer.finish(STOPPED)
    assert steps_of(tmp_path / "run.parquet") == kept


def test_the_next_journal_that_cannot_be_opened_ends_the_recording_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: Path) -> Journal:
        raise OSError(errno.EMFILE, "Too many open files")

    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"), rows_per_part=15)
    write(writer, range(5))
    monkeypatch.setattr(writer_module, "Journal", none_left)
    with pytest.raises(OSError, match="Too many"):
        write(writer, range(5, 6))
    monkeypatch.undo()
    write(writer, range(5, 7))  # a number is left out
    writer.finish(RunInfo("r", end="completed"))
    assert steps_of(tmp_path / "run.parquet") == list(range(7))


def test_a_disk_that_is_full_from_the_start_is_no_place_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        refused(monkeypatch, errno.ENOSPC, "pwrite"),
        pytest.raises(CaptureError, match=r"cannot write .*No space left"),
    ):
        RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    assert os.listdir(tmp_path) == []


def test_a_run_without_an_end_may_be_one_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("r"))
    write(writer, range(2))
    parts = tmp_path / "run.parquet.parts"
    shutil.copytree(parts, tmp_path / "other.parquet.parts")  # as it is left when nothing more can be written
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with open_run(tmp_path / "other.parquet") as run:
        (missing,) = run.missing
    assert missing == ("the step after 1 was in flight when the run was killed, or its directory had become read-only")
    writer.finish(STOPPED)
