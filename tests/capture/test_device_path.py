"""The accelerator's way, forced onto tensors of the CPU: the same records, one wait for each backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.tracing import Recorded, Row, read
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gradtrace
from gradtrace.capture.statistics import Statistics
from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.triggers import Triggers

WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
}
"""What makes a program wait for its accelerator, besides copies to the host."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.embed(index))).relu_())


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(passes):
        model(torch.randint(7, (5,))).square().mean().backward()
    optimizer.step()


def events_of(function: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return Counter(event.name for event in profiler.events())


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors that are copied to the host, growing as they are."""
    shapes: list[tuple[int, ...]] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        original = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            shapes.append(tuple(tensor.shape))
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)
    return shapes


def test_a_step_waits_for_nothing_that_the_script_does_not_wait_for(tmp_path: Path) -> None:
    model, optimizer = build()
    plain = events_of(lambda: one_step(model, optimizer))
    with Tracer(model, tmp_path / "run.parquet", _on_device=True):
        one_step(model, optimizer)
        traced = events_of(lambda: one_step(model, optimizer))
    assert traced["aten::isfinite"] + traced["aten::isnan"] > 30  # it was measured
    assert {name: traced[name] for name in WAITS} == {name: plain[name] for name in WAITS}
    with Tracer(model, tmp_path / "host.parquet", _on_device=False):
        host = events_of(lambda: one_step(model, optimizer))
    assert host["aten::_local_scalar_dense"] > 60  # on the CPU looking is free


@pytest.mark.parametrize("passes", [1, 3])
def test_the_host_looks_once_for_each_backward(tmp_path: Path, transfers: list[tuple[int, ...]], passes: int) -> None:
    model, optimizer = build()
    with Tracer(model, tmp_path / "run.parquet", _on_device=True):
        for _ in range(4):
            before = len(transfers)
            one_step(model, optimizer, passes)
            assert len(transfers) == before + passes
            assert all(len(shape) == 1 and shape[0] % 6 == 0 for shape in transfers[before:])


@pytest.mark.parametrize("passes", [1, 3])
def test_the_host_looks_once_for_each_backward_of_a_watched_step(
    tmp_path: Path, transfers: list[tuple[int, ...]], passes: int
) -> None:
    model, optimizer = build()
    with Tracer(model, tmp_path / "run.parquet", mode="watch", triggers=Triggers(first=0), _on_device=True):
        for _ in range(4):
            before = len(transfers)
            one_step(model, optimizer, passes)
            assert len(transfers) == before + passes


def test_an_evaluation_within_training_waits_for_nothing(tmp_path: Path, transfers: list[tuple[int, ...]]) -> None:
    model, optimizer = build()
    with Tracer(model, tmp_path / "run.parquet", _on_device=True):
        one_step(model, optimizer)
        before = len(transfers)
        with torch.no_grad():
            for _ in range(5):
                model(torch.randint(7, (5,)))
        assert len(transfers) == before


@pytest.mark.parametrize("clip", [1.0, math.nan])
def test_the_final_look_at_the_gradients_waits_for_nothing(
    tmp_path: Path, transfers: list[tuple[int, ...]], clip: float
) -> None:
    model, optimizer = build()
    with Tracer(model, tmp_path / "run.parquet", _on_device=True) as tracer:
        model(torch.randint(7, (5,))).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = len(transfers)
        optimizer.step()
        assert len(transfers) == before
    final = read(tracer.path).where(tensor="grad", phase="optimizer")
    # Kept until the numbers are there, and written only where they differ from what arrived.
    assert len(final) == (0 if clip == 1.0 else 5)
    assert all(row["nan_count"] == row["numel"] for row in final)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randint(7, (5,))).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        one_step(model, optimizer, passes=2)
        with torch.no_grad():
            model(torch.randint(7, (5,)))


def gan(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.SGD(model.head.parameters(), lr=0.2)
    for _ in range(3):
        for current in (optimizer, other):
            one_step(model, current)


def inference(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randint(7, (5,)))


def closures(model: nn.Module, _: torch.optim.Optimizer) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(7)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def without_optimizer(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.randint(7, (5,))).square().mean().backward()


def recorded_on(path: Path, train: Callable[..., None], on_device: bool) -> Recorded:
    model, optimizer = build()
    with Tracer(model, path, existing="overwrite", _on_device=on_device):
        train(model, optimizer)
    return read(path)


TRAININGS = [scaled, accumulating, gan, inference, closures, without_optimizer]
IDS = [train.__name__ for train in TRAININGS]


@pytest.mark.parametrize("train", TRAININGS, ids=IDS)
def test_both_ways_give_the_same_records_in_the_same_order(tmp_path: Path, train: Callable[..., None]) -> None:
    host = recorded_on(tmp_path / "run.parquet", train, on_device=False)
    device = recorded_on(tmp_path / "run.parquet", train, on_device=True)
    assert host.info.end == device.info.end == "completed"
    assert host.info.steps == device.info.steps
    # The values of the loss code can be worked out before backward frees it, on a device they are not there yet.
    rows = [[row for row in recorded.rows if row["phase"] not in ("replay", "event")] for recorded in (host, device)]
    assert len(rows[0]) == len(rows[1]) > 20
    for one, other in zip(*rows, strict=True):
        assert_same_record(one, other)
    numbers = [row["seq"] for row in device.rows]
    assert numbers == sorted(set(numbers))


def assert_same_record(one: Row, other: Row) -> None:
    measured = ("min", "max", "norm")
    exact = [name for name in one if name not in ("time", "seq", *measured)]
    assert [one[name] for name in exact] == [other[name] for name in exact]
    for name in measured:
        if one[name] is None or other[name] is None:
            assert one[name] == other[name], one
        else:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-30), one


def test_a_run_in_progress_shows_what_the_device_has_told_so_far(tmp_path: Path) -> None:
    model, optimizer = build()
    with Tracer(model, tmp_path / "run.parquet", _on_device=True) as tracer:
        for _ in range(3):
            one_step(model, optimizer)
        run = gradtrace.open_run(tracer.path)
        counts = "select step, count(*) from records where tensor = '{}' and phase = '{}' group by 1 order by 1"
        assert run.sql(counts.format("grad", "backward")).rows == [(0, 5), (1, 5), (2, 5)]
        # The last update is waited for by the next backward.
        assert run.sql(counts.format("param", "optimizer")).rows == [(0, 5), (1, 5)]


def test_a_long_evaluation_does_not_pile_up_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.capture.steps._MOST_WAITING", 100)
    model, optimizer = build()
    highest = [0]
    measure = Statistics.measure

    def counted(self: Statistics, tensor: Tensor) -> Any:
        highest[0] = max(highest[0], self.waiting)
        return measure(self, tensor)

    monkeypatch.setattr(Statistics, "measure", counted)
    with Tracer(model, tmp_path / "run.parquet", _on_device=True), torch.no_grad():
        for _ in range(60):
            model(torch.randint(7, (5,)))
    del optimizer
    assert 100 <= highest[0] < 130
    assert len(read(tmp_path / "run.parquet").where(tensor="output", module="")) == 60
