"""``gradtrace.trace``: what it asks the tracer for, and what ``GRADTRACE`` makes of it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace
from gradtrace.capture import tracer as tracer_module
from gradtrace.capture.block import Untraced
from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.triggers import Triggers
from gradtrace.errors import CaptureError
from tests.capture.tracing import read

SOURCE = """
import sys, torch, gradtrace
model = torch.nn.Linear(2, 1)
with gradtrace.trace(model, "off.parquet", mode="watch", every=3) as tracer:
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        tracer.step()
print(tracer.path, tracer.info.end, tracer.bytes_written)
print(*(name for name in ("pyarrow", "gradtrace.capture.tracer") if name in sys.modules))
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which the tests run in, and no variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GRADTRACE")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the tracer was asked for last."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(tracer_module, "Tracer", lambda models, path, **options: found.update(options, path=path))
    return found


def test_without_arguments_and_configuration_everything_is_by_default(asked: dict[str, Any]) -> None:
    gradtrace.trace(None)
    assert asked == {
        "path": "run.parquet",
        "existing": "refuse",
        "command": sys.argv,
        "mode": "full",
        "engine": "graph",
        "every": 1,
        "steps": None,
        "first_step": 0,
        "include": (),
        "exclude": (),
        "replays": 3,
        "on_nonfinite": "continue",
        "keep_compiled": False,
        "loss_lines": True,
        "op_steps": None,
        "capsule_limit": 2**30,
        "max_size": 2_000_000_000,
        "baseline": None,
        "triggers": Triggers(),
    }


def test_arguments_are_above_variables_and_variables_above_the_file(
    asked: dict[str, Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "pyproject.toml").write_text(
        "[tool.gradtrace]\nmode = 'watch'\nevery = 2\nreplays = 2\nsteps = '1:2'\nwatch_first = 2\nwatch_after = 2\n"
    )
    monkeypatch.setenv("GRADTRACE_REPLAYS", "5")
    monkeypatch.setenv("GRADTRACE_WATCH_AFTER", "5")
    gradtrace.trace(None, "x.parquet", overwrite=True, every=7, steps=None, watch_share=0.5)
    assert asked["path"] == "x.parquet"
    assert asked["existing"] == "overwrite"
    assert [asked[key] for key in ("mode", "every", "replays", "steps")] == ["watch", 7, 5, None]
    assert asked["triggers"] == Triggers(first=2, after=5, share=0.5)


@pytest.mark.parametrize("arguments", [{}, {"mode": "full"}, {"mode": "watch"}])
@pytest.mark.parametrize("word", ["watch", "full"])
def test_the_variable_is_above_the_mode_that_the_code_asks_for(
    word: str, arguments: dict[str, Any], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADTRACE", word)
    monkeypatch.setenv("GRADTRACE_MODE", "full")
    gradtrace.trace(None, **arguments)
    assert asked["mode"] == word


def test_settings_reach_the_recording(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "pyproject.toml").write_text("[tool.gradtrace]\nfirst_step = 40\nexclude = ['1']\n")
    monkeypatch.setenv("GRADTRACE_REPLAYS", "1")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with gradtrace.trace(model) as tracer:
        model(torch.ones(1, 2)).sum().backward()
    recorded = read(Path(tracer.path))
    assert {row["step"] for row in recorded.rows} == {40}
    assert recorded.where(module="0") and not recorded.where(module="1")
    assert recorded.info.config["replays"] == 1


# --- off ------------------------------------------------------------------------------------------------


def test_switched_off_a_block_records_nothing_loads_nothing_and_goes_through(project: Path) -> None:
    environ = os.environ | {"GRADTRACE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", SOURCE], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "off.parquet off 0\n\n"
    assert done.stderr == ""
    assert list(project.iterdir()) == []


def test_switched_off_nothing_is_watched_and_an_error_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADTRACE", "off")
    call = nn.Module.__call__
    with pytest.raises(ZeroDivisionError), gradtrace.trace(nn.Linear(1, 1)):
        assert nn.Module.__call__ is call
        raise ZeroDivisionError


def test_switched_off_no_setting_is_looked_at(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADTRACE", "off")
    (project / "pyproject.toml").write_text("[tool.gradtrace]\nevry = 1\n")
    assert isinstance(gradtrace.trace(None), Untraced)


def test_what_stands_in_for_a_tracer_has_all_that_a_tracer_has() -> None:
    stand_in = Untraced("run.parquet")
    for name in dir(Tracer):
        if not name.startswith("_"):
            assert hasattr(stand_in, name), name
    for name in ("start", "stop", "stop_quickly", "step", "__enter__", "__exit__"):
        wanted, found = (inspect.signature(getattr(kind, name)) for kind in (Tracer, Untraced))
        assert list(wanted.parameters.values()) == list(found.parameters.values()), name


def test_what_stands_in_for_a_tracer_does_nothing(project: Path) -> None:
    tracer = Untraced("run.parquet")
    assert tracer.start() is tracer
    tracer.step()
    tracer.step(5)
    assert tracer.stop() is tracer.info
    assert tracer.stop_quickly("signal SIGTERM") is tracer.info
    assert (tracer.path, tracer.moved_to, tracer.bytes_written) == (Path("run.parquet"), None, 0)
    assert (tracer.info.end, tracer.info.steps, tracer.info.captured, tracer.info.records) == ("off", 0, 0, 0)
    assert list(project.iterdir()) == []


# --- mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GRADTRACE", "of", "GRADTRACE: 'of' is not one of 'off', 'watch', 'full'"),
        ("GRADTRACE_EVRY", "2", "GRADTRACE_EVRY is no setting of gradtrace; did you mean GRADTRACE_EVERY?"),
        ("GRADTRACE_EVERY", "0", "GRADTRACE_EVERY: 0 is not a whole number, 1 or more"),
    ],
)
def test_a_mistake_in_a_variable_is_an_error_where_the_block_is_made(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CaptureError) as refused:
        gradtrace.trace(None)
    assert str(refused.value) == message


def test_a_trigger_that_makes_no_sense_is_an_error() -> None:
    with pytest.raises(CaptureError, match="the trigger share cannot be 2; it is a part from 0 to 1"):
        gradtrace.trace(None, watch_share=2)
