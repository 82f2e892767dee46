"""A recorded training dies in every way that there is: its exit code is its own, and nothing of it is lost.

The script tells each step to a file of its own before it goes on (``scripts/dying.py``); that is what the recording is
held against. Every command then reads what is left, and says how the run ended and what is missing.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gradtrace_cli.main import main

import gradtrace
from tests.integrations.running import SCRIPTS

COMMANDS = ("first-nan", "summary", "sql", "check", "report")
IN_FLIGHT = "the step after {last} was in flight when the run was killed"


@dataclass
class Death:
    """What is expected: exit code, how the run ended, what is missing, and whether it is left in its parts."""

    code: int
    end: str
    missing: str | None = None
    parts: bool = False


def killed(code: int) -> Death:
    return Death(code, "killed", IN_FLIGHT, parts=True)


def left(number: signal.Signals) -> Death:
    return Death(-number, f"signal {number.name}", None, parts=True)


DEATHS = {
    "kill": killed(-signal.SIGKILL),
    "kill in forward": killed(-signal.SIGKILL),
    "terminate": left(signal.SIGTERM),
    "terminate in forward": left(signal.SIGTERM),
    "terminate twice": left(signal.SIGTERM),
    "interrupt": Death(-signal.SIGINT, "signal SIGINT"),
    "hang up": left(signal.SIGHUP),
    "leave at once": killed(7),
    "raise": Death(1, "exception ValueError"),
    "exit with a text": Death(1, "exit 1"),
    "exit with a large number": Death(44, "exit 300"),
    "abort": killed(-signal.SIGABRT),
    "segmentation fault": killed(-signal.SIGSEGV),
    "worker raises": Death(1, "exception ValueError"),
    "worker is killed": Death(1, "exception RuntimeError"),
    "address space": Death(1, "exception RuntimeError"),
    "memory error": Death(1, "exception MemoryError"),
    "out of memory": killed(-signal.SIGKILL),
    "become another program": killed(9),
    "record anew": Death(1, "exception ValueError"),
    "child is killed": Death(0, "completed"),
    "child raises": Death(0, "completed"),
    "stop and go on": Death(0, "completed"),
    "thread outlives main": Death(0, "completed"),
    "train at exit": Death(0, "completed"),
    "nobody listens": Death(0, "completed"),
    "interrupt before the merge": Death(0, "completed", parts=True),
    "interrupt in the merge": Death(0, "completed", parts=True),
    "terminate in the merge": Death(-signal.SIGTERM, "completed", parts=True),
    "kill in the merge": Death(-signal.SIGKILL, "completed", parts=True),
    "kill after the merge": Death(-signal.SIGKILL, "completed", parts=True),
    "daemon trains for ever": Death(-signal.SIGABRT, "completed"),
}
UNTIDY = "daemon trains for ever"
KILLED_WORKER = "worker is killed"
TAKES_ALONG = ("terminate in forward", "terminate twice", KILLED_WORKER, UNTIDY)
"""Where what there is of the step in flight may be kept: nobody has told it."""
REPAIRED = ("kill in the merge", "terminate in the merge", "kill after the merge")
KEPT = "gradtrace: signal {name}; what was recorded is kept: gradtrace first-nan run.parquet"
INTERRUPTED = (
    "gradtrace: warning: interrupted while finishing; what was recorded is kept: gradtrace first-nan run.parquet"
)


@dataclass
class Left:
    """What a death has left: the folder, the exit code, and how the run read while its process was stopped."""

    folder: Path
    code: int
    meanwhile: tuple[str, list[str]] | None = None

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in (self.folder / "told").read_text().split()]


def read(folder: Path) -> tuple[str, list[str]]:
    with gradtrace.open_run(folder / "run.parquet") as run:
        return run.end, run.missing


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Left]]:
    """What is left of a recorded training, by the way in which it died."""
    folder = tmp_path_factory.mktemp("dead")
    found: dict[str, Left] = {}
    pipe = subprocess.PIPE
    command = [sys.executable, str(SCRIPTS / "die.py"), str(folder), *DEATHS]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number, way in enumerate(DEATHS):
            meanwhile = None
            code = json.loads(process.stdout.readline())
            if code is None:
                meanwhile = read(folder / str(number))
                process.stdin.write("go on\n")
                process.stdin.flush()
                code = json.loads(process.stdout.readline())
            found[way] = Left(folder / str(number), code, meanwhile)
    assert process.returncode == 0
    yield found


@pytest.mark.parametrize("way", DEATHS)
def test_every_step_before_the_death_can_be_read_and_every_command_says_what_is_missing(
    dead: dict[str, Left], way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected, found = DEATHS[way], dead[way]
    if way == KILLED_WORKER:
        expected = replace(expected, end=f"exception {raised(found)}")
    shutil.copytree(found.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    steps = found.steps
    before_death = 5 if way == "record anew" else len(steps)
    assert before_death >= 5
    # A thread that trains as the interpreter goes away: how torch ends then is a matter of luck, recorded or not.
    assert found.code == expected.code or (way == UNTIDY and found.code in (0, -signal.SIGSEGV))
    assert Path("run.parquet.parts").is_dir() == expected.parts

    with gradtrace.open_run("run.parquet") as run:
        rows = run.sql("select step, count(*) from records where tensor = 'loss' group by 1 order by 1").rows
        assert [step for step, _ in rows[:before_death]] == list(range(before_death))
        takes_along = way in TAKES_ALONG
        assert len(rows) <= before_death + takes_along
        updates = run.sql("select step, count(*) from records where tensor = 'param' and step > 0 group by 1").rows
        assert {count for step, count in updates if step < before_death} == {4}
        assert (run.end, run.steps - before_death) in {(expected.end, 0), (expected.end, int(takes_along))}
        steps_there = run.steps
        missing = [] if expected.missing is None else [expected.missing.format(last=before_death - 1)]
        assert run.missing == missing
    assert Path("run.parquet.parts").is_dir() == (expected.parts and way not in REPAIRED)

    for command in COMMANDS:
        query = ["select count(distinct step) from records"] if command == "sql" else []
        assert main([command, "run.parquet", *query]) == 0
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        for words in missing:
            assert words in said.err or words in said.out, command
        if command == "summary":
            assert f"{steps_there} steps, 4 modules, " in said.out
            assert expected.end in said.out


def raised(found: Left) -> str:
    """Return which of the errors in which a loader may say that its worker is gone has ended the script."""
    name = re.findall(r"^(\w+Error)\b", (found.folder / "said").read_text(), re.MULTILINE)[-1]
    assert name in ("RuntimeError", "ConnectionResetError")
    return str(name)


def said(found: Left) -> list[str]:
    lines = (found.folder / "said").read_text().splitlines()
    return [line for line in lines if line.startswith("gradtrace: ")]


def test_who_dies_of_a_signal_says_once_what_is_kept(dead: dict[str, Left]) -> None:
    for way in ("terminate", "terminate in forward", "terminate twice"):
        assert said(dead[way]) == [KEPT.format(name="SIGTERM")]
    for way in ("interrupt before the merge", "interrupt in the merge"):
        assert said(dead[way]) == [INTERRUPTED]
    assert said(dead["hang up"]) == []


def test_a_stopped_run_is_one_that_is_being_recorded(dead: dict[str, Left]) -> None:
    end, missing = dead["stop and go on"].meanwhile or ("", [])
    assert (end, missing) == ("running", ["the run is still being recorded; this is what there is up to step 4"])
    assert dead["stop and go on"].steps == list(range(7))


def test_threads_exit_handlers_and_forks_are_recorded_to_their_end(dead: dict[str, Left]) -> None:
    counts = {"thread outlives main": 9, "train at exit": 8, "child is killed": 7, "child raises": 7}
    assert {way: dead[way].steps for way in counts} == {way: list(range(count)) for way, count in counts.items()}


def test_a_training_that_starts_anew_in_the_same_process_moves_its_first_run_aside(dead: dict[str, Left]) -> None:
    folder = dead["record anew"].folder
    assert said(dead["record anew"])[0] == "gradtrace: moved the older run.parquet to run.1.parquet"
    with gradtrace.open_run(folder / "run.1.parquet") as run:
        assert (run.end, run.steps, run.info.command[-1]) == ("killed", 5, "record anew")
    with gradtrace.open_run(folder / "run.parquet") as run:
        assert (run.end, run.steps, run.info.command[-1]) == ("exception ValueError", 5, "raise")
