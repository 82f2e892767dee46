"""A disk that fails in the middle of a training: the training goes on as if nobody watched, one line says what is lost.

Each fault happens for real, in a process of its own: a file system that is full (where it may be mounted, else the
kernel's answer is given in its place), a directory that is removed or replaced, limits of the process, permissions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from gradtrace_cli.main import main

import gradtrace

SCRIPT = Path(__file__).parent / "scripts" / "failing_disk.py"
SMALL_PARTS = ("--max-size", "1MB")
"""A journal is closed and encoded every five steps or so."""


class Fault(NamedTuple):
    """What is done to the disk before step 20, what the line says of it, and what can be read afterwards."""

    name: str
    options: tuple[str, ...]
    words: str
    is_in_one_file: bool
    is_said_in_the_file: bool = True


FULL = Fault("full", (), "the disk is full", False)
FAULTS = (
    FULL._replace(options=SMALL_PARTS),
    Fault("size limit", (), "a file has reached the largest size that is allowed (ulimit -f)", True),
    Fault("too many files", SMALL_PARTS, "the process has too many files open (ulimit -n)", False),
    Fault("permission", SMALL_PARTS, "permission denied", False),
    Fault("broken", SMALL_PARTS, "the disk reports an input/output error", False, is_said_in_the_file=False),
    Fault("read-only", (), "the file system is read-only", False, is_said_in_the_file=False),
    Fault("quota", (), "the disk quota is used up", False, is_said_in_the_file=False),
)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory that everybody may enter, and a small disk of its own, where this process may mount one."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=777", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield path
    if mounted:
        subprocess.run(["umount", str(path)], check=True)
    shutil.rmtree(path)


def run(command: list[str], directory: Path, **facts: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DIRECTORY": str(directory)}
    environment |= {name: str(value) for name, value in facts.items()}
    return subprocess.run([sys.executable, *command], env=environment, cwd=directory, capture_output=True, text=True)


def recorded(directory: Path, fault: str, *options: str, **facts: object) -> subprocess.CompletedProcess[str]:
    command = ["-m", "gradtrace", "record", "-o", "run.parquet", *options, str(SCRIPT)]
    return run(command, directory, FAULT=fault, **facts)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training comes to when nobody watches."""
    done = run([str(SCRIPT)], tmp_path_factory.mktemp("alone"))
    assert (done.returncode, done.stderr) == (5, "")
    return done.stdout


def losses(path: Path) -> list[tuple[int, float]]:
    with gradtrace.open_run(path) as opened:
        return opened.sql("select step, max from records where tensor = 'loss' order by step").rows


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_disk_that_fails_ends_the_recording_and_not_the_training(
    disk: Path, alone: str, fault: Fault, capsys: pytest.CaptureFixture[str]
) -> None:
    done = recorded(disk, fault.name, *fault.options)
    assert (done.returncode, done.stdout) == (5, alone)
    stopped, wrote, see = done.stderr.splitlines()
    assert stopped == (
        f"gradtrace: warning: recording stopped at step 20: {fault.words}; the training goes on; "
        f"the 20 steps up to 19 can be read from {disk}/run.parquet"
    )
    made = "wrote run.parquet" if fault.is_in_one_file else "kept run.parquet in its parts"
    assert wrote.startswith(f"gradtrace: {made}: 20 steps, 18 of 18 modules, 2,178 records, ")
    assert see == "gradtrace: no incident; see: gradtrace summary run.parquet"
    assert [step for step, _ in losses(disk / "run.parquet")] == list(range(20))
    note = f"gradtrace: note: recording stopped after step 19: {fault.words}; the training went on\n"
    is_said = fault.is_said_in_the_file and (fault.name != "full" or os.path.ismount(disk))
    if not is_said:  # not a byte could be written any more
        note = "gradtrace: note: the step after 19 was in flight when the run was killed\n"
    for command in (["summary"], ["first-nan"], ["sql", "-q"], ["check"], ["report", "-o", "-"]):
        arguments = [command[0], str(disk / "run.parquet"), *command[1:]]
        if command[0] == "sql":
            arguments = ["sql", str(disk / "run.parquet"), "select count(*) from records"]
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert out
        assert err == note


def test_when_there_is_room_again_the_recording_is_finished_at_the_end(disk: Path, alone: str) -> None:
    done = recorded(disk, "full", THEN="room")
    assert (done.returncode, done.stdout) == (5, alone)
    stopped, wrote, _ = done.stderr.splitlines()
    assert "recording stopped at step 20: the disk is full" in stopped
    assert wrote.startswith("gradtrace: wrote run.parquet: 20 steps, ")
    assert [step for step, _ in losses(disk / "run.parquet")] == list(range(20))
    assert os.listdir(disk) == ["run.parquet"]


def test_a_directory_that_goes_away_is_noticed_in_the_next_step(tmp_path: Path, alone: str) -> None:
    for fault in ("removed", "replaced"):
        directory = tmp_path / fault
        directory.mkdir()
        done = recorded(directory, fault, *SMALL_PARTS)
        assert (done.returncode, done.stdout) == (5, alone)
        assert done.stderr == (
            "gradtrace: warning: recording stopped at step 20: the directory is gone: removed, moved or replaced; "
            f"the training goes on; nothing is left at {directory}/run.parquet\n"
        )
    assert os.listdir(tmp_path / "removed") == []
    assert os.listdir(tmp_path / "replaced" / "run.parquet.parts") == ["mine.txt"]
    moved = tmp_path / "replaced" / "elsewhere.parquet"
    assert [step for step, _ in losses(moved)] == list(range(20))


def test_a_disk_that_is_full_when_the_recording_is_finished_leaves_it_in_its_parts(disk: Path, alone: str) -> None:
    done = recorded(disk, "full", AT="end")
    assert (done.returncode, done.stdout) == (5, alone)
    unfinished, kept, see = done.stderr.splitlines()
    assert unfinished == (
        "gradtrace: warning: the recording could not be finished: the disk is full; "
        f"the 60 steps up to 59 can be read from {disk}/run.parquet"
    )
    assert kept.startswith("gradtrace: kept run.parquet in its parts: 60 steps, 18 of 18 modules, 6,498 records, ")
    assert see == "gradtrace: no incident; see: gradtrace summary run.parquet"
    assert [step for step, _ in losses(disk / "run.parquet")] == list(range(60))


def test_filters_of_the_scripts_own_do_not_swallow_the_line(tmp_path: Path, alone: str) -> None:
    done = recorded(tmp_path, "removed", QUIET=1)
    assert (done.returncode, done.stdout) == (5, alone)
    assert [line.partition(":")[2].partition(":")[0] for line in done.stderr.splitlines()] == [" warning"]


@pytest.mark.parametrize("where", ["full/run.parquet", "file/run.parquet", "/proc/none/run.parquet"])
def test_a_place_that_cannot_be_written_from_the_start_ends_the_script_before_it_trains(disk: Path, where: str) -> None:
    (disk / "file").write_text("")
    (disk / "full").symlink_to("/dev/full")
    done = run(["-m", "gradtrace", "record", "-o", where, str(SCRIPT)], disk)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gradtrace: error: cannot write {disk / where}: ")
    assert sorted(os.listdir(disk)) == ["file", "full"]
