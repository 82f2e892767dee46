"""A disk that is slower than the training: what stays of a step, which steps are thinned, and that they are counted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

import gradtrace
from gradtrace.capture import log as log_module
from gradtrace.capture.columns import Columns
from gradtrace.capture.measures import Measure
from gradtrace.capture.rows import Rows
from gradtrace.capture.sites import Site
from gradtrace.capture.slow_disk import MOST_PROTECTED, SlowDisk, thinned
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from gradtrace.trace.pace import Pace
from gradtrace.trace.protection import AROUND
from gradtrace.trace.thinning import Plan
from gradtrace.trace.thinning import thinned as thinned_table
from gradtrace.trace.writer import RunWriter
from tests.capture.tracing import record

# --- what stays of a step ----------------------------------------------------------------------------------


class Branches(nn.Module):
    """A model with a buffer, a mask of -inf on its way, and a gradient that can be spoilt for one parameter or all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.masks = nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])
        return self.head(self.masks(self.stem(x) + mask).softmax(-1))


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    output = model(torch.randn(8, 4))
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()
    optimizer.step()


def one_gradient_nan(model: Any, optimizer: torch.optim.Optimizer) -> None:
    handle = model.head.bias.register_hook(lambda gradient: gradient * torch.nan)
    plain(model, optimizer)
    handle.remove()


def all_gradients_inf(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (model(torch.randn(8, 4)).sum() * torch.inf).backward()
    optimizer.step()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain(model, optimizer)
    with torch.no_grad():
        model(torch.randn(8, 4))


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


STEPS = (plain, accumulated, two_losses, one_gradient_nan, all_gradients_inf, evaluated, scaled)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Rows]]:
    """The rows of steps as they are handed over; they are written as they are."""
    found: list[tuple[int, Rows]] = []

    def fitting(self: SlowDisk, step: int, rows: Rows, *, in_full: bool) -> tuple[Rows, str]:
        assert in_full
        found.append((step, rows))
        return rows, "full"

    monkeypatch.setattr(SlowDisk, "fitting", fitting)
    return found


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("op_steps", [None, (1, 3)], ids=["boundaries", "operations"])
def test_a_thinned_step_has_exactly_what_one_has_that_is_thinned_later(
    tmp_path: Path, seen: list[tuple[int, Rows]], step: Callable[..., None], op_steps: Any
) -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for kind in (plain, step, plain):
            optimizer.zero_grad()
            kind(model, optimizer)

    record(None, tmp_path, train, op_steps=op_steps, replays=0, capsule_limit=0)
    assert {number for number, _ in seen} >= {0, 1, 2}
    for number, rows in seen:
        number += 1  # else the plan keeps the first step
        expected = thinned_table(pa.Table.from_batches([batch(number, rows)]), Plan(full=2**62), [""])
        assert batch(number, thinned(rows, [""])).to_pylist() == expected.to_pylist()
        assert len(thinned(rows, [""])) < len(rows)


def batch(step: int, rows: Rows) -> pa.RecordBatch:
    return Columns(0).batch(rows, step, datetime(2026, 1, 1, tzinfo=timezone.utc))


# --- which steps -------------------------------------------------------------------------------------------

COMPUTE = 0.25
FULL, SMALL = 2.0, 0.001
"""Seconds of the clock that a step takes, and that the disk takes for many rows and for few."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Record to a disk that is slow by a clock of the test's own; what is returned lets the time of a step pass."""
    now = [0.0]
    write = RunWriter.write

    def slow_write(self: RunWriter, rows: pa.RecordBatch) -> None:
        write(self, rows)
        now[0] += FULL if rows.num_rows > 20 else SMALL

    monkeypatch.setattr(log_module, "Pace", lambda: Pace(lambda: now[0]))
    monkeypatch.setattr(RunWriter, "write", slow_write)

    def passes() -> None:
        now[0] += COMPUTE

    return passes


def train(steps: int, at: Callable[[int, torch.Tensor], torch.Tensor], compute: Callable[[], None]) -> list[float]:
    torch.manual_seed(1)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(at(step, torch.randn(8, 4))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        compute()
    return losses


def healthy(step: int, batch: torch.Tensor) -> torch.Tensor:
    return batch


def traced(path: Path, *arguments: Any) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught, Tracer(None, path, replays=0, capsule_limit=0):
        warnings.simplefilter("always")
        losses = train(*arguments)
    return losses, [str(warning.message) for warning in caught]


def steps_by_kind(run: gradtrace.Run) -> tuple[list[int], list[int]]:
    """Return the steps in full and the thinned ones, as their rows tell: those have the gradients' norm."""
    query = "select step, not bool_or(tensor = 'grad_norm') from records group by step order by step"
    kinds = dict(run.sql(query).rows)
    return [step for step, full in kinds.items() if full], [step for step, full in kinds.items() if not full]


def test_steps_are_thinned_and_counted_and_the_training_is_the_same(tmp_path: Path, slow: Callable[[], None]) -> None:
    expected = train(400, healthy, lambda: None)
    losses, said = traced(tmp_path / "run.parquet", 400, healthy, slow)
    assert losses == expected
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        full, few = steps_by_kind(run)
        assert sorted(full + few) == list(range(400))
        counts = dict(run.sql("select step, count(*) from records group by step").rows)
        assert {counts[step] for step in full[1:]} == {39}
        # The mask's two boundaries, which hold -inf, the output, the loss, the norm and the learning rate.
        assert {counts[step] for step in few} == {6}
        assert run.info.paced == {"first_step": few[0], "last_step": few[-1], "steps": len(few)}
        assert run.info.captured == len(full)
        assert run.info.records == run.sql("select count(*) from records").rows[0][0]
        found = run.sql("select step, max from records where tensor = 'loss' order by step").rows
        assert [loss for _, loss in found] == pytest.approx(expected)
        words = f"{len(few)} of the steps {few[0]} to {few[-1]} were thinned to watched ones, "
        assert f"{words}because the disk was slower than the training" in run.missing
        assert [f"{len(few)} of the steps {few[0]} to {few[-1]} were thinned as they came" in n for n in run.info.notes]
    # Seven of eight at least: the disk takes eight times as long for a step in full as all else.
    assert len(full) < 9 + (400 - 9) / 8
    assert said == [
        f"the disk is slower than the training: from step {few[0]} on most steps are recorded as if they were "
        "only watched; the last lines will say how many"
    ]


def test_an_incident_in_a_thinned_stretch_has_the_verdict_that_it_always_has(
    tmp_path: Path, slow: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(step: int, values: torch.Tensor) -> torch.Tensor:
        return values * 1e30 if step == 301 else values

    def verdict(name: str) -> dict[str, Any]:
        with gradtrace.open_run(tmp_path / name) as run:
            found = run.first_nan().to_dict()
        keys = (
            "step",
            "phase",
            "module",
            "call",
            "tensor",
            "path",
            "kind",
            "nan_count",
            "numel",
            "reached",
            "affected",
        )
        return {key: found[key] for key in keys}

    traced(tmp_path / "slow.parquet", 340, spoilt, slow)
    with gradtrace.open_run(tmp_path / "slow.parquet") as run:
        full, few = steps_by_kind(run)
    assert set(range(301, 301 + AROUND + 1)) <= set(full)
    assert 300 in few
    monkeypatch.setattr(log_module, "Pace", Pace)
    traced(tmp_path / "usual.parquet", 340, spoilt, lambda: None)
    with gradtrace.open_run(tmp_path / "usual.parquet") as run:
        assert steps_by_kind(run) == (list(range(340)), [])
    assert verdict("slow.parquet") == verdict("usual.parquet")
    assert verdict("slow.parquet")["step"] == 301


def test_an_incident_that_never_ends_does_not_hold_up_the_training_for_ever() -> None:
    class Slow(Pace):
        every = 8

    slow_disk = SlowDisk(Slow(), [""])
    row = Site("forward", None, "input", "0"), 0, 0, Measure.of_number(1.0), None
    full = []
    for step in range(1, 400):
        if step > 100:
            slow_disk.protect(step - 1)  # as soon as the step is over
        _, kind = slow_disk.fitting(step, Rows([row], [step]), in_full=True)
        full += [step] if kind == "full" else []
    around = range(100 - AROUND, 100 - AROUND + MOST_PROTECTED)
    assert full == [step for step in range(1, 400) if step % 8 == 0 or (step > 100 and step in around)]


def test_what_is_not_finite_in_every_step_is_news_once() -> None:
    class Slow(Pace):
        every = 1000

    slow_disk = SlowDisk(Slow(), [""])
    mask = Site("forward", None, "output", "mask"), 0, 0, Measure.of_number(-math.inf), None
    other = Site("forward", None, "output", "0"), 0, 0, Measure.of_number(math.nan), None
    fine = Site("forward", None, "output", "0"), 0, 0, Measure.of_number(1.0), None
    steps = [[mask, fine], [mask, fine], [mask, other], [mask, other], [mask, fine]]
    kinds = [slow_disk.fitting(n, Rows(rows, [2 * n, 2 * n + 1]), in_full=True)[1] for n, rows in enumerate(steps, 1)]
    assert kinds == ["full", "thinned", "full", "thinned", "thinned"]


def test_steps_whose_operations_are_asked_for_stay(tmp_path: Path, slow: Callable[[], None]) -> None:
    with pytest.warns(GradtraceWarning), Tracer(None, tmp_path / "run.parquet", op_steps=(101, 104)):
        train(140, healthy, slow)
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        full, few = steps_by_kind(run)
        operations = run.sql("select distinct step from records where op is not null order by 1").rows
    assert operations == [(101,), (102,), (103,)]
    assert {101, 102, 103} <= set(full)
    assert 99 in few
    assert set(range(101, 103 + AROUND)) <= set(full)


def test_in_watch_mode_there_is_nothing_to_thin(tmp_path: Path, slow: Callable[[], None]) -> None:
    with Tracer(None, tmp_path / "run.parquet", mode="watch") as tracer:
        train(60, healthy, slow)
    assert tracer.info.paced == {}
    assert tracer.info.captured == 5
