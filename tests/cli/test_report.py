"""gradtrace report, on the command itself."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner, Result
from gradtrace_cli import report as report_module
from gradtrace_cli.main import main
from gradtrace_cli.report import report
from traces import write_run

from gradtrace.errors import MissingPackageError, NoMatchError, RunNotFoundError
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record

FINITE = {"nan_count": 0, "posinf_count": 0, "neginf_count": 0, "min": -1.0, "max": 1.0, "norm": 2.0}


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch):
    monkeypatch.setattr("gradtrace.analysis.report.page.plotly_script", lambda: "/* plotly.js */")
    monkeypatch.setattr("gradtrace.analysis.report.writing.plotly_script", lambda: "/* plotly.js */")


@pytest.fixture
def run(tmp_path, monkeypatch):
    rows = [Record(step, step, "forward", "output", "", "0", **FINITE) for step in range(3)]
    write_run(tmp_path / "run.parquet", rows, modules=[ModuleInfo("", "Net", root=True)])
    monkeypatch.chdir(tmp_path)
    return "run.parquet"


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(report, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_page_lies_beside_the_run_and_stdout_stays_empty(run, tmp_path):
    result = invoke(run)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    assert "No NaN or Inf that matters in 3 steps" in page
    assert (result.stdout, result.stderr, result.exit_code) == ("", "Wrote run.html (0.0 MB)\n", 0)


def test_an_earlier_report_is_replaced_and_another_file_only_by_force(run, tmp_path):
    invoke(run, "--title", "first")
    invoke(run, "--title", "second")
    page = tmp_path / "run.html"
    assert "<title>second</title>" in page.read_text(encoding="utf-8")
    page.write_text("my notes")
    refused = CliRunner().invoke(report, [run], standalone_mode=False)
    assert isinstance(refused.exception, click.ClickException)
    assert str(refused.exception) == "run.html exists and is no report; pass --force to overwrite it, or another -o"
    assert page.read_text() == "my notes"
    invoke(run, "--force")
    assert "<title>run.parquet</title>" in page.read_text(encoding="utf-8")


def test_a_dash_puts_the_page_on_stdout_alone(run, tmp_path):
    result = invoke(run, "-o", "-")
    assert result.stdout.startswith("<!DOCTYPE html>") and result.stdout.endswith("</html>\n")
    assert result.stderr == ""
    assert not (tmp_path / "run.html").exists()


def test_a_terminal_gets_no_page(run, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["report", run, "-o", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradtrace: error: a page is no reading for a terminal")


def test_what_is_left_out_is_said_on_stderr_as_on_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [Record(step, step, "forward", "output", "", "0", **FINITE) for step in range(1_200)]
    write_run(tmp_path / "run.parquet", rows)
    words = "1,200 steps drawn as 600 columns of 2: the extremes of each and every NaN and Inf are kept"
    assert invoke("run.parquet").stderr.splitlines()[1:] == [f"gradtrace: note: {words}"]
    assert words in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_steps_and_rank_choose_what_is_drawn(run):
    assert "only steps 1:2 are shown" in invoke(run, "--steps", "1:2").stderr
    with pytest.raises(NoMatchError, match="has no rank 3; it has: 0"):
        invoke(run, "--rank", "3")


def test_the_page_of_several_ranks_lies_beside_their_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        rows = [Record(0, 0, "forward", "output", "", "0", rank=rank, **FINITE)]
        write_run(tmp_path / "run.parquet", rows, rank=rank, world_size=2)
    invoke("run.parquet/")
    assert (tmp_path / "run.html").exists()


def test_open_shows_the_file_in_a_browser(run, tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(report_module.webbrowser, "open", opened.append)
    invoke(run, "--open")
    assert opened == [(tmp_path / "run.html").as_uri()]


def test_without_plotly_nothing_is_read(run, tmp_path, monkeypatch):
    def missing() -> str:
        raise MissingPackageError("a report needs plotly: pip install 'gradtrace[report]'")

    monkeypatch.setattr("gradtrace.analysis.report.page.plotly_script", missing)
    with pytest.raises(MissingPackageError):
        invoke("no-such-run.parquet")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run.parquet", "-o", "nowhere/run.html"], "no such directory: nowhere; see: gradtrace report --help"),
        (["*.parquet"], "a glob has no name for a report; pass -o PATH; see: gradtrace report --help"),
        (["run.parquet", "-o", "."], ". is a directory; pass -o with the name of a file; see: gradtrace report --help"),
        (["run.parquet", "-o", "-", "--open"], "--open needs a file; leave out -o -; see: gradtrace report --help"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_run_is_read(run, capsys, arguments, words):
    assert main(["report", *arguments]) == 2
    assert capsys.readouterr().err == f"gradtrace: error: {words}\n"


def test_a_run_that_is_not_there_leaves_no_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunNotFoundError):
        invoke("run.parquet")
    assert list(tmp_path.iterdir()) == []
