"""The alarm and the fuse: when an incident is noticed, what is said, and when the run is stopped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.analysis.verdict import first_nan
from gradtrace.errors import GradtraceWarning, NonFiniteError


class Root(nn.Module):
    """Square root: infinite slope at 0, nan below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sqrt()


ONE, ZERO, NEGATIVE = torch.ones(3), torch.zeros(3), -torch.ones(3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def events(path: Path) -> list[tuple[int, str, str]]:
    query = "SELECT step, tensor, detail FROM records WHERE phase = 'event' AND tensor <> 'replay' ORDER BY seq"
    with gradtrace.open_run(path) as run:
        return run.execute(query).fetchall()


def test_the_fuse_stops_before_the_optimizer_and_names_the_boundary(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradtrace.trace(model, path, on_nonfinite="stop"):
        step(model, optimizer, ONE)
        after_one = model.weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradtraceWarning)
            with pytest.raises(NonFiniteError) as stopped:
                step(model, optimizer, ZERO)
    assert torch.equal(model.weight, after_one)
    assert stopped.value.step == 1
    text = "step 1: gradients not finite; first non-finite: (root), grad weight"
    assert str(stopped.value) == f"{text}; for the verdict: gradtrace first-nan {path}"
    assert events(path) == [(1, "incident", text), (1, "stop", "stopped before the optimizer's step, as asked")]
    with gradtrace.open_run(path) as run:
        assert first_nan(run).to_dict()["step"] == 1


def test_the_fuse_is_off_by_default_and_one_line_is_said_for_an_incident(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradtrace.trace(model, path), pytest.warns(GradtraceWarning) as said:
        for x in (ONE, NEGATIVE, ONE):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.zero_grad()
            optimizer.step()
    texts = [str(warning.message) for warning in said]
    assert texts == ["step 1: the model's output, loss, gradients not finite; first non-finite: (root), output 0"]
    assert [event[:2] for event in events(path)] == [(1, "incident")]


def test_an_incident_that_goes_on_is_said_once_and_one_that_comes_back_again(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradtrace.trace(model, path), pytest.warns(GradtraceWarning) as said:
        for x in (NEGATIVE, NEGATIVE, ONE, NEGATIVE):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.zero_grad()
            optimizer.step()
    assert [str(warning.message).partition(":")[0] for warning in said] == ["step 0", "step 3"]


def test_a_step_that_the_scaler_skips_is_no_incident_and_does_not_stop_the_run(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 1), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e30)
    with gradtrace.trace(model, path, on_nonfinite="stop"), warnings.catch_warnings():
        warnings.simplefilter("error", GradtraceWarning)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((4, 2), 1e10)).sum()).backward()
            assert not model.weight.grad.isfinite().all()
            scaler.step(optimizer)
            scaler.update()
    assert [event[:2] for event in events(path)] == [(0, "skip"), (1, "skip")]


def test_with_a_scaler_a_nan_loss_stops_the_run_before_the_weights_change(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradtrace.trace(model, path, on_nonfinite="stop"), pytest.warns(GradtraceWarning):
        scaler.scale(model(NEGATIVE).sum()).backward()
        with pytest.raises(NonFiniteError):
            scaler.step(optimizer)
    assert torch.equal(model.weight, ONE)
    with gradtrace.open_run(path) as run:
        (detail,) = run.execute("SELECT detail FROM records WHERE tensor = 'replay'").fetchone()
    assert '"reproduced"' in detail


def test_a_batch_that_the_script_skips_is_noticed_at_the_next_call(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradtrace.trace(model, path), pytest.warns(GradtraceWarning, match="step 1: the model's output not finite"):
        for x in (ONE, NEGATIVE, ONE):
            loss = model(x).sum()
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    with gradtrace.open_run(path) as run:
        query = "SELECT op, tensor, nan_count FROM records WHERE phase = 'replay' AND detail IS NOT NULL"
        assert run.execute(query).fetchall() == [("SqrtBackward0", "output", 3)]


def test_values_of_healthy_steps_do_not_name_an_incident(tmp_path: Path) -> None:

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = Scores()
            self.root = Root()

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x).exp() + self.root(x)

    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[0] * 0 - float("inf"), x[1], x[2] + 1])

    model, path = Model(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradtrace.trace(model, path), pytest.warns(GradtraceWarning) as said:
        step(model, optimizer, ONE)
        step(model, optimizer, NEGATIVE)
    (text,) = (str(warning.message) for warning in said)
    assert text.endswith("first non-finite: root, output 0")


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gradtrace.errors.CaptureError, match="no such on_nonfinite: 'halt'"):
        gradtrace.trace(None, tmp_path / "run.parquet", on_nonfinite="halt")  # type: ignore[arg-type]
    with pytest.raises(gradtrace.errors.CaptureError, match="replays cannot be -1"):
        gradtrace.trace(None, tmp_path / "run.parquet", replays=-1)


# A run that ends, and errors on their way -----------------------------------------------------------------------


def test_a_run_that_ends_with_an_incident_is_finished_and_not_stopped(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    with (
        pytest.warns(GradtraceWarning, match="step 0: the model's output not finite"),
        gradtrace.trace(model, path, on_nonfinite="stop") as tracer,
    ):
        model(NEGATIVE)
    assert tracer.info.end == "completed"
    assert [event[:2] for event in events(path)] == [(0, "incident")]


def test_an_error_that_the_script_raises_itself_comes_through(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    with (
        pytest.warns(GradtraceWarning),
        pytest.raises(ValueError, match="the loss is nan"),
        gradtrace.trace(model, path, on_nonfinite="stop") as tracer,
    ):
        if model(NEGATIVE).sum().isnan():
            raise ValueError("the loss is nan")
    assert tracer.info.end == "exception ValueError"
    with gradtrace.open_run(path) as run:
        (detail,) = run.execute("SELECT detail FROM records WHERE tensor = 'replay'").fetchone()
    assert '"reproduced"' in detail


@pytest.mark.parametrize("on_nonfinite", ["continue", "stop"])
def test_an_interrupt_during_backward_is_not_taken_over_and_nothing_is_run_again(
    tmp_path: Path, on_nonfinite: Literal["continue", "stop"]
) -> None:
    model, calls = Root(), []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return self.inner(x)

    def interrupt(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    model.weight.register_hook(interrupt)
    with gradtrace.trace(Counted(), tmp_path / "run.parquet", on_nonfinite=on_nonfinite) as tracer:
        counted = tracer._models["Counted"]
        with pytest.raises(KeyboardInterrupt):
            counted(NEGATIVE).sum().backward()
        assert len(calls) == 1
        tracer.stop_quickly("signal SIGTERM")
    tracer._detach()  # a process that is about to die need not do that
    assert len(calls) == 1


def test_what_the_users_own_anomaly_mode_raises_comes_through_and_is_explained(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    with (
        gradtrace.trace(model, path, on_nonfinite="stop"),
        pytest.warns(GradtraceWarning),
        torch.autograd.set_detect_anomaly(True),
    ):
        loss = model(NEGATIVE).sum()
        with (
            pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
            pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"),
        ):
            loss.backward()
        assert torch.is_anomaly_enabled()
    with gradtrace.open_run(path) as run:
        (detail,) = run.execute("SELECT detail FROM records WHERE tensor = 'replay'").fetchone()
    assert '"reproduced"' in detail


def test_an_intermediate_value_of_a_step_that_is_recorded_by_operations_is_no_incident(tmp_path: Path) -> None:
    class Mended(Root):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x / 0 - x / 0).nan_to_num()

    model, path = Mended(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradtrace.trace(model, path, op_steps=(0, 2)), warnings.catch_warnings():
        warnings.simplefilter("error", GradtraceWarning)
        for _ in range(2):
            step(model, optimizer, ONE)
    assert events(path) == []
    with gradtrace.open_run(path) as run:
        query = "SELECT count(*) FROM records WHERE op IS NOT NULL AND nan_count = 3"
        assert run.execute(query).fetchone() != (0,)


def test_what_came_in_from_elsewhere_leaves_no_capsule(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        gradtrace.trace(model, path),
        pytest.warns(GradtraceWarning, match="first non-finite: [(]root[)], grad weight"),
    ):
        model(ONE).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad[0] = float("nan")  # as a reduction over ranks would
        optimizer.step()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.parquet"]
