"""What a record costs, counted rather than timed: operations of torch, and calls of gradtrace's own functions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradtrace.capture
from gradtrace.capture.tracer import Tracer

LAYERS = 4
PACKAGE = gradtrace.capture.__path__[0]


class Training:
    """A chain of linear layers and activations, as hook-bound as a training gets."""

    def __init__(self, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.Tanh())))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(4, 8)

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def operations_of(function: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return Counter(event.name for event in profiler.events())


def own_calls_of(function: Callable[[], object]) -> int:
    """Count the calls of functions of ``gradtrace.capture``."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Training, Tracer]]:
    training = Training()
    with Tracer(training.model, tmp_path / "run.parquet") as tracer:
        training.step()
        training.step()  # from here on, steps are like the one before
        yield training, tracer


def rows_of(tracer: Tracer, function: Callable[[], object]) -> int:
    before = tracer.info.records
    function()
    return tracer.info.records - before


ALONE = operations_of(Training().step)


def test_each_tensor_is_read_twice_and_no_more(traced: tuple[Training, Tracer]) -> None:
    training, _ = traced
    seen = operations_of(training.step)
    seen.subtract(ALONE)
    activations = 1 + 2 * LAYERS  # the batch, and what each module returns
    gradients = 2 * LAYERS  # what arrives at each module; what leaves it arrives at the one before
    parameters = 2 * LAYERS
    tensors = activations + gradients + parameters + parameters  # their gradients, and they themselves after the step
    assert seen["aten::aminmax"] == tensors + 1  # the loss
    assert seen["aten::dot"] == tensors + 1
    assert seen["aten::sum"] == parameters + 1  # a last look at the gradients before the step, at all of them in one
    assert seen["aten::item"] == 3 * (tensors + 1) + 1
    for copying in ("aten::clone", "aten::contiguous", "aten::copy_", "aten::isnan", "aten::isfinite"):
        assert seen[copying] == 0, copying


def test_a_record_takes_a_handful_of_calls(traced: tuple[Training, Tracer]) -> None:
    training, tracer = traced
    rows = rows_of(tracer, training.step)
    assert rows == 2 + 4 * LAYERS + 2 + 4 * LAYERS - 1 + 4 * LAYERS + 2 - 1
    assert own_calls_of(training.step) < 23 * rows


def test_calls_grow_no_faster_than_records(tmp_path: Path) -> None:
    counts = []
    for layers in (10, 40):
        training = Training(layers)
        with Tracer(training.model, tmp_path / "run.parquet", existing="overwrite"):
            training.step()
            training.step()
            counts.append(own_calls_of(training.step))
    assert counts[1] < 4 * counts[0]
