"""Answers that do not fit where they are to go: one line, the exit code of bad files, nothing half-written."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradtrace_cli.main import main
from traces import write_run

from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [Record(step, step, "loss", "loss", min=1.0, max=1.0, norm=1.0, numel=1) for step in range(2000)]
    return write_run(tmp_path / "run.parquet", rows, steps_at_once=100, modules=[ModuleInfo("", "Net", root=True)])


@pytest.fixture
def full() -> Iterator[None]:
    """No file can grow beyond ten thousand bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_report_that_does_not_fit_leaves_the_older_one(
    run: Path, full: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run.with_suffix(".html")
    page.write_text('<meta name="generator" content="gradtrace"> an older one')
    assert main(["report", str(run), "--force"]) == 3
    assert capsys.readouterr().err == f"gradtrace: error: {page}: File too large\n"
    assert page.read_text().endswith("an older one")
    assert sorted(os.listdir(run.parent)) == ["run.html", "run.parquet"]


def test_an_export_that_does_not_fit_leaves_the_older_one(
    run: Path, full: None, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run.parent / "events"
    assert main(["export", str(run), "--tensorboard", str(directory), "--every", "500"]) == 0
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    capsys.readouterr()
    assert main(["export", str(run), "--tensorboard", str(directory), "--force"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradtrace: error: ")
    assert line.endswith("File too large")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("command", ["sql", "summary"])
def test_a_process_without_stdout_or_stderr(run: Path, command: str) -> None:
    arguments = [str(run), *(["select 1"] if command == "sql" else [])]
    words = [sys.executable, "-m", "gradtrace", command, *arguments]
    wrong = [sys.executable, "-m", "gradtrace", command, "none.parquet", *arguments[1:]]

    def ask(shell: str, words: list[str]) -> tuple[int, str, str]:
        done = subprocess.run(["sh", "-c", f'"$@" {shell}', "sh", *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert ask(">&-", words) == (0, "", "")
    assert ask(">&-", wrong) == (3, "", "gradtrace: error: no such file: none.parquet\n")
    assert ask("2>&-", wrong) == (3, "", "")
    assert ask("<&- >&- 2>&-", words) == (0, "", "")


def test_stdout_and_stderr_on_a_full_disk(run: Path) -> None:
    command = [sys.executable, "-m", "gradtrace"]
    query = "select * from records"
    with open("/dev/full", "w") as nowhere:
        short, long, error = (
            subprocess.Popen(
                [*command, *arguments],
                text=True,
                stdout=nowhere if lacks == "stdout" else subprocess.PIPE,
                stderr=nowhere if lacks == "stderr" else subprocess.PIPE,
            )
            for lacks, arguments in (
                ("stdout", ["sql", str(run), "select 1"]),
                ("stdout", ["sql", str(run), query, "-f", "csv"]),
                ("stderr", ["sql", str(run.with_name("none")), query]),
            )
        )
        assert short.communicate()[1] == "gradtrace: error: No space left on device\n"
        assert long.communicate()[1] == "gradtrace: error: No space left on device\n"
        assert error.communicate()[0] == ""
    assert [process.returncode for process in (short, long, error)] == [3, 3, 3]
