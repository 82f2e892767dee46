"""Errors of gradtrace's own, wherever they strike, never reach the training."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.capture.arrivals import Arrivals
from gradtrace.capture.backward import GraphGradients
from gradtrace.capture.backward_watch import BackwardWatch
from gradtrace.capture.calls import Calls
from gradtrace.capture.clock import Clock
from gradtrace.capture.log import StepLog
from gradtrace.capture.names import Names
from gradtrace.capture.parameters import ParameterWatch
from gradtrace.capture.places import Hooks
from gradtrace.capture.session import Session
from gradtrace.capture.statistics import Statistics
from gradtrace.capture.steps import Steps
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from gradtrace.trace.writer import RunWriter


class Fault(Exception):
    """What none of gradtrace's parts expects."""


def train() -> dict[str, Any]:
    """Train a small model with everything that is watched: a scaler, a buffer, a late module, an evaluation."""
    torch.manual_seed(3)
    middle = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), middle, nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    losses = []
    for step in range(5):
        if step == 2:
            model.append(nn.Linear(2, 2))
        optimizer.zero_grad()
        loss = model(torch.randn(6, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(torch.randn(6, 3)).sum().item())
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state, "random": torch.get_rng_state().tolist()}


def hooked_functions() -> list[object]:
    functions: list[object] = [nn.Module.__call__, torch.autograd._engine_run_backward]
    return [*functions, torch.amp.GradScaler.step, torch.compile]


def failing(original: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
    """Return a function that works so many times and then raises for ever."""
    calls = [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > calls_before:
            raise Fault("out of order\nand a second line")
        return original(*args, **kwargs)

    return fails


PLACES = [
    (Calls, "begin"),
    (Calls, "finish"),
    (Calls, "_open"),
    (GraphGradients, "call_begins"),
    (GraphGradients, "call_returns"),
    (GraphGradients, "outermost_ended"),
    (Hooks, "_arrived"),
    (Hooks, "_left"),
    (Hooks, "_passed"),
    (GraphGradients, "backward_ended"),
    (GraphGradients, "never_fired"),
    (BackwardWatch, "_backward_starts"),
    (Arrivals, "watch"),
    (Arrivals, "_gradient_arrived"),
    (ParameterWatch, "call_begins"),
    (ParameterWatch, "optimizer_begins"),
    (ParameterWatch, "record_states"),
    (Steps, "outermost_call"),
    (Steps, "optimizer_stepped"),
    (Steps, "loss_scale"),
    (Steps, "close"),
    (Clock, "outermost_call"),
    (Names, "entry"),
    (Names, "refresh"),
    (Names, "tensors"),
    (Names, "freeze"),
    (Session, "record"),
    (Session, "see"),
    (Statistics, "measure"),
    (Statistics, "resolve"),
    (StepLog, "end_step"),
    (RunWriter, "write"),
]
CASES = [(*place, calls) for place in PLACES for calls in (0, 1 if place[1] == "refresh" else 3)]
NAMES = [f"{owner.__name__}.{name}-{calls}" for owner, name, calls in CASES]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the training comes to when nobody watches."""
    return train()


@pytest.mark.parametrize(("owner", "name", "calls_before"), CASES, ids=NAMES)
def test_an_error_of_its_own_ends_the_recording_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    owner: type,
    name: str,
    calls_before: int,
) -> None:
    functions = hooked_functions()
    path = tmp_path / "run.parquet"
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), calls_before))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracer = Tracer(None, path).start()
        try:
            result = train()
            during = hooked_functions()
        finally:
            tracer.stop()
    assert during == functions
    assert hooked_functions() == functions
    assert result == expected
    monkeypatch.undo()
    info = gradtrace.open_run(path).info
    (warning,) = caught
    assert warning.category is GradtraceWarning
    assert "the training goes on" in str(warning.message)
    assert "Fault: out of order" in str(warning.message)
    assert info.end == "tracer failed: Fault: out of order"
    assert tracer.info.end == info.end


@pytest.mark.parametrize("owner_and_name", [(Statistics, "measure"), (RunWriter, "write")], ids=["measure", "write"])
def test_an_error_does_no_harm_where_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any], owner_and_name: tuple[type, str]
) -> None:
    owner, name = owner_and_name
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Tracer(None, tmp_path / "run.parquet"):
            assert train() == expected
    monkeypatch.undo()
    assert gradtrace.open_run(tmp_path / "run.parquet").info.end == "tracer failed: Fault: out of order"


def test_what_was_written_before_the_error_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.parquet"
    monkeypatch.setattr(RunWriter, "write", failing(RunWriter.write, 2))
    with pytest.warns(GradtraceWarning, match="recording stopped"), Tracer(None, path):
        train()
    run = gradtrace.open_run(path)
    assert run.sql("select distinct step from records order by step").rows == [(0,), (1,)]
    assert run.info.steps == 2


def test_a_tensor_that_cannot_be_measured_is_counted_and_the_recording_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    measure = Statistics.measure

    def refuses_buffers(self: Statistics, tensor: Tensor) -> Any:
        if tensor.shape == (4,) and not tensor.requires_grad:
            raise RuntimeError("no kernel for this one")
        return measure(self, tensor)

    monkeypatch.setattr(Statistics, "measure", refuses_buffers)
    with Tracer(None, tmp_path / "run.parquet") as tracer:
        assert train() == expected
    assert tracer.info.end == "completed"
    assert tracer.info.unmeasured["RuntimeError while measuring"] > 8


def test_a_disk_that_is_full_at_the_end_is_said_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.parquet"

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules[RunWriter.__module__], "merge", full)
    with (
        pytest.warns(
            GradtraceWarning, match="could not be finished: the disk is full; the 5 steps up to 4 can be read"
        ),
        Tracer(None, path),
    ):
        train()
    monkeypatch.undo()
    run = gradtrace.open_run(path)
    assert run.sql("select count(distinct step) from records").rows == [(5,)]


def test_a_user_error_is_the_users_and_no_failure_of_the_recording(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 5))
        model(torch.ones(2, 3)).sum().backward()
    assert tracer.info.end == "completed"
    assert tracer.info.records > 4


STOPPED_BY_SIGNAL = """
import os, signal, sys, torch
from torch import nn
from gradtrace.capture.tracer import Tracer
from gradtrace.trace.writer import RunWriter

torch.set_num_threads(1)
tracer = Tracer(None, sys.argv[1]).start()

def stop(number, frame):
    tracer.stop_quickly("signal SIGTERM")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
moment = sys.argv[2]

class Interrupted(nn.Module):
    def forward(self, x):
        if moment == "forward" and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(x)

class InJournal:
    def __init__(self, journal):
        self.journal = journal
    def __getattr__(self, name):
        return getattr(self.journal, name)
    def append(self, batch):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        self.journal.append(batch)

if moment == "write":
    next_journal = RunWriter._next_journal
    RunWriter._next_journal = lambda self: InJournal(next_journal(self))
outer = Interrupted()
for step in range(4):
    outer(torch.ones(1, 3)).sum().backward()
    if moment == "optimizer" and step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
    optimizer.zero_grad()
print("not reached")
"""


def test_a_signal_at_any_moment_leaves_a_run_that_can_be_read(tmp_path: Path) -> None:
    # What is in flight is kept too, unless the signal comes in the middle of its being written.
    moments = {"forward": [], "optimizer": [(2, 1)], "write": []}
    processes = {
        moment: subprocess.Popen(
            [sys.executable, "-c", STOPPED_BY_SIGNAL, str(tmp_path / moment), moment],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for moment in moments
    }
    for moment, in_flight in moments.items():
        output, _ = processes[moment].communicate(timeout=60)
        assert (processes[moment].returncode, output) == (0, "")
        run = gradtrace.open_run(tmp_path / moment)
        assert run.info.end == "signal SIGTERM"
        steps = run.sql("select step, count(*) from records where tensor = 'loss' group by 1 order by 1").rows
        assert steps == [(0, 1), (1, 1), *in_flight]


def test_a_forked_child_records_nothing_and_its_training_works(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        model(torch.ones(1, 3)).sum().backward()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            model(torch.full((1, 3), 5.0)).sum().backward()
            tracer.stop()
            os.write(writer, str(model.weight.grad.sum().item()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert float(os.read(reader, 100)) == 3 * 2 * (1.0 + 5.0)
        model(torch.full((1, 3), 2.0)).sum().backward()
        os.close(reader)
        os.close(writer)
    run = gradtrace.open_run(tmp_path / "run.parquet")
    assert run.info.end == "completed"
    inputs = run.sql("select max from records where tensor = 'input' order by seq").rows
    assert inputs == [(1.0,), (2.0,)]


class Squares(torch.utils.data.Dataset[Tensor]):
    """A data set that calls a module of its own in the workers."""

    def __init__(self) -> None:
        self.transform = nn.Linear(1, 1)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.transform(torch.full((1,), float(index)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_the_workers_of_a_loader_record_nothing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    with Tracer(None, tmp_path / "run.parquet") as tracer:
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
    assert (tracer.info.end, tracer.info.steps) == ("completed", 3)
    run = gradtrace.open_run(tmp_path / "run.parquet")
    assert run.sql("select distinct module from records where tensor = 'output'").rows == [("",)]
