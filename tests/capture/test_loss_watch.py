"""The loss code as a recording sees it: what is known of the model's outputs, and what the verdict gets of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.analysis.verdict import first_nan

pytestmark = pytest.mark.filterwarnings("ignore::gradtrace.errors.GradtraceWarning")


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * x, self.weight * 100


def answer(path: Path) -> dict[str, Any]:
    with gradtrace.open_run(path) as run:
        verdict: dict[str, Any] = first_nan(run).to_dict()
    return verdict


def test_outputs_that_are_gone_before_backward_are_known_to_have_been_finite(tmp_path: Path) -> None:
    def loss_of(mean: Tensor, log_variance: Tensor) -> Tensor:
        variance = log_variance.exp()
        return mean.pow(2).mean() + 0.5 * (variance - log_variance).sum()

    model, path = Gaussian(), tmp_path / "run.parquet"
    with gradtrace.trace(model, path):
        loss_of(*model(torch.ones(2))).backward()
    found = answer(path)
    assert (found["phase"], found["op"], found["op_kind"]) == ("loss", "ExpBackward0", "Infinity")
    assert found["location"]["code"] == "variance = log_variance.exp()"
    assert found["term"].startswith("term 2 of 2: MulBackward0, test_loss_watch.py:")


def test_the_penalty_on_a_gradient_is_part_of_the_loss_code(tmp_path: Path) -> None:
    critic, path = nn.Linear(2, 1, bias=False), tmp_path / "run.parquet"
    nn.init.zeros_(critic.weight)
    with gradtrace.trace(critic, path):
        x = torch.ones(3, 2, requires_grad=True)
        scores = critic(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        length = slope.pow(2).sum(dim=1).sqrt()
        (scores.mean() + (length - 1).pow(2).mean()).backward()
    found = answer(path)
    assert (found["op"], found["op_kind"]) == ("SqrtBackward0", "-Infinity")
    assert found["location"]["code"] == "length = slope.pow(2).sum(dim=1).sqrt()"


def test_without_loss_lines_the_operation_is_known_and_its_line_is_not(tmp_path: Path) -> None:
    model, path = Gaussian(), tmp_path / "run.parquet"
    with gradtrace.trace(model, path, loss_lines=False):
        mean, _ = model(torch.zeros(2))
        mean.log().sum().backward()
    found = answer(path)
    assert (found["op"], found["op_kind"], found["location"]) == ("LogBackward0", "-Infinity", None)


def test_anomaly_mode_is_the_users_own_after_each_step_and_after_the_recording(tmp_path: Path) -> None:
    model = Gaussian()
    with gradtrace.trace(model, tmp_path / "run.parquet"):
        loss = sum(output.sum() for output in model(torch.ones(2)))
        assert not torch.is_anomaly_enabled()
        assert isinstance(loss, Tensor)
        loss.backward()
        assert not torch._C.is_anomaly_enabled()
        model(torch.ones(2))
    assert not torch._C.is_anomaly_enabled()
