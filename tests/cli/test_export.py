"""gradtrace export, through the command line: what is written, what is said, what is refused."""

from __future__ import annotations

import io
import sys

import pytest
from gradtrace_cli import progress as progress_module
from gradtrace_cli.main import main
from gradtrace_cli.progress import progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from traces import write_run

from gradtrace.trace.schema import Record


def loss(step, rank=0):
    return Record(
        step, step, "loss", "loss", rank=rank, numel=1, nan_count=0, posinf_count=0, neginf_count=0, max=step / 2
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run("run.parquet", map(loss, range(6)))
    return "run.parquet"


def losses(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars("global/loss")]


def test_event_files_are_written_and_how_to_look_at_them_is_said(run, tmp_path, capsys):
    assert main(["export", run, "--tensorboard", "my runs/first"]) == 0

    stdout, stderr = capsys.readouterr()
    (file,) = (tmp_path / "my runs" / "first").iterdir()
    assert losses(file.parent) == [(step, step / 2) for step in range(6)]
    assert stdout == ""
    assert stderr == (
        f"gradtrace: wrote my runs/first/{file.name}: 6 steps, 2 curves, 12 points\n"
        "gradtrace: to see them: tensorboard --logdir 'my runs/first'\n"
    )


def test_steps_can_be_chosen(run):
    assert main(["export", run, "--tensorboard", "events", "--steps", "1:6", "--every", "2"]) == 0
    assert losses("events") == [(2, 1.0), (4, 2.0)]


def test_several_ranks_are_several_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        write_run("ddp.parquet", [loss(2 * rank, rank)], rank=rank, world_size=2)

    assert main(["export", "ddp.parquet", "--tensorboard", "events"]) == 0
    assert losses("events/rank-1") == [(2, 1.0)]
    assert "gradtrace: wrote 2 files below events: 2 steps, 4 curves, 4 points\n" in capsys.readouterr().err


def test_a_recording_that_is_not_whole_is_exported_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run("run.parquet", [loss(0)], end="tracer failed: it is so")

    assert main(["export", "run.parquet", "--tensorboard", "events"]) == 0
    assert (
        "gradtrace: note: recording stopped after step 0: it is so; the training went on\n" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "say what to export to: --tensorboard DIR; for csv there is: gradtrace sql -f csv"),
        (["--tensorboard", "full"], 2, "full has an earlier export; pass --force to replace it, or another directory"),
        (
            ["--tensorboard", "new", "--steps", "9:"],
            3,
            "the recording has no steps of these",
        ),
        (["--tensorboard", "run.parquet"], 3, "run.parquet: File exists"),
        (["--tensorboard", "new", "--every", "0"], 2, "invalid value for '--every': 0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(run, capsys, arguments, code, message):
    main(["export", run, "--tensorboard", "full"])
    capsys.readouterr()

    assert main(["export", run, *arguments]) == code
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    assert stderr.removesuffix("; see: gradtrace export --help\n").rstrip() == f"gradtrace: error: {message}"


def test_force_replaces_an_earlier_export(run, tmp_path):
    main(["export", run, "--tensorboard", "events"])

    assert main(["export", run, "--tensorboard", "events", "--steps", ":2", "--force"]) == 0
    assert losses("events") == [(0, 0.0), (1, 0.5)]
    assert len(list((tmp_path / "events").iterdir())) == 1


def test_a_missing_package_is_said_before_the_recording_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    assert main(["export", str(tmp_path / "no_such_run.parquet"), "--tensorboard", "events"]) == 2
    assert capsys.readouterr().err == (
        "gradtrace: error: event files for TensorBoard need its package: pip install 'gradtrace[tensorboard]'\n"
    )


# --- the bar -----------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """What stderr is while a test runs: a terminal, or none."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def shown(monkeypatch, *, is_terminal, delay):
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_module, "_DELAY", delay)
    with progress("writing") as advance:
        advance(0.0)
        advance(0.5)
        drawn = screen.getvalue()
    return drawn, screen.getvalue()


def test_a_bar_grows_on_a_terminal_and_is_gone_in_the_end(monkeypatch):
    empty = "\r\x1b[Kwriting [                              ]   0%"
    half = "\r\x1b[Kwriting [###############               ]  50%"
    assert shown(monkeypatch, is_terminal=True, delay=0) == (empty + half, empty + half + "\r\x1b[K")


@pytest.mark.parametrize(("is_terminal", "delay"), [(False, 0), (True, 3600)])
def test_there_is_no_bar_in_a_pipe_and_none_for_what_is_done_soon(monkeypatch, is_terminal, delay):
    assert shown(monkeypatch, is_terminal=is_terminal, delay=delay) == ("", "")
