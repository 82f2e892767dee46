"""Steps of very many passes, and runs of very many incidents: what is kept of them is bounded, and still right."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.capture import arrivals, backward, log, sites, steps
from gradtrace.capture.loss import watch
from gradtrace.capture.replay import alarm
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from tests.capture.tracing import read
from tests.live_objects import live


class Masked(nn.Module):
    """A layer, and a mask of -inf that goes through a module and matters to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.softmax(torch.tensor([0.0, 0.0, -torch.inf, 0.0]))
        return result


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything that is bounded reach its bound soon."""
    monkeypatch.setattr(arrivals, "_MOST_ARRIVED", 4)
    monkeypatch.setattr(backward, "_MOST_WATCHED", 10)
    monkeypatch.setattr(watch, "_MOST_CALLS", 10)
    monkeypatch.setattr(sites, "_MOST_REMARKS", 4)
    monkeypatch.setattr(steps, "_MOST_ROWS", 200)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said when incidents are noticed."""
    words: list[str] = []
    monkeypatch.setattr(alarm, "warn", words.append)
    return words


@pytest.mark.parametrize("mode", ["full", "watch"])
def test_what_is_kept_of_a_step_does_not_grow_with_its_passes(tmp_path: Path, small_limits: None, mode: Any) -> None:
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    with Tracer(model, tmp_path / "run.parquet", mode=mode) as tracer:
        for number in range(81):
            if number == 60:
                gc.collect()
            model(torch.randn(3, 4)).square().mean().backward()
            if number % 20 == 0:
                counts.append(live())
                assert len(tracer._session.rows) <= 250
                assert len(tracer._parameters.arrivals.of(model.layer.weight)) <= 4
        optimizer.step()
    of_rows = {"Measure", "Watched", "_Outline"}
    assert {kind: count for kind, count in (counts[4] - counts[2]).items() if kind not in of_rows} == {}
    recorded = read(tmp_path / "run.parquet")
    assert recorded.columns("step", "micro_step", tensor="loss") == [(0, number) for number in range(81)]
    assert recorded.info.unmeasured == {}


def test_no_row_of_a_step_is_judged_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is not finite, so each pass is looked at; each look at all rows of the step would make that quadratic."""
    judged = 0
    is_bad = alarm._is_bad

    def counted(row: Any) -> bool:
        nonlocal judged
        judged += 1
        return is_bad(row)

    monkeypatch.setattr(alarm, "_is_bad", counted)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        for _ in range(50):
            model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert judged <= 2.2 * tracer.info.records  # once as they come, once when the step ends


@pytest.mark.parametrize("calls", [3, 40])
def test_the_loss_code_of_the_last_pass_is_known_after_however_many(
    tmp_path: Path, small_limits: None, said: list[str], calls: int
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracer(model, tmp_path / "run.parquet"):
        for _ in range(calls):
            model(torch.randn(3, 4)).square().mean().backward()
        (model(torch.randn(3, 4)) * 0).log().sum().backward()
        optimizer.step()
    recorded = read(tmp_path / "run.parquet")
    assert {row["op"] for row in recorded.where(phase="replay", tensor="output")} == {"LogBackward0"}
    assert len(said) == 1


def test_boundaries_that_no_gradient_reaches_are_counted_in_long_steps_too(tmp_path: Path, small_limits: None) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.right(x)
            result: Tensor = self.left(x)
            return result

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        for _ in range(25):
            model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
    (count,) = tracer.info.unmeasured.values()
    assert count == 25


def test_one_graph_gone_through_many_times_is_written_in_pieces(tmp_path: Path, small_limits: None) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        output = model(torch.randn(3, 4)).square().mean()
        for _ in range(150):
            torch.autograd.grad(output, model.weight, retain_graph=True)
            assert len(tracer._session.rows) <= 210
        optimizer.step()
    details = read(tmp_path / "run.parquet").columns("step", "detail", tensor="grad")
    assert details == [(0, None), *((0, f"pass {number}") for number in range(2, 151))]


def test_of_a_flood_of_incidents_the_first_are_said_and_all_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(alarm, "_MOST_SAID", 3)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        for number in range(20):
            (model(torch.randn(3, 4)).sum() * (torch.nan if number % 2 else 1.0)).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert [line.partition(":")[0] for line in said] == ["step 1", "step 3", "step 5"]
    assert said[-1].endswith("; more incidents will be recorded without a word")
    assert tracer.info.incidents == 10
    assert [row["step"] for row in read(tmp_path / "run.parquet").where(tensor="incident")] == list(range(1, 20, 2))


def test_a_scaler_has_a_number_of_its_own_though_another_is_gone(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(scaler: torch.amp.GradScaler) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with Tracer(model, tmp_path / "run.parquet"):
        first, second = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
        step(first)
        step(second)
        del first
        gc.collect()
        third = torch.amp.GradScaler("cpu")
        step(third)
        step(second)
    assert read(tmp_path / "run.parquet").columns("path", tensor="loss_scale") == [("0",), ("1",), ("2",), ("1",)]


def test_facts_that_take_long_to_write_are_not_written_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do of thousands of modules, when a run goes on making new ones."""
    now = 0.0
    monkeypatch.setattr(log, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    with Tracer(None, tmp_path / "run.parquet") as tracer:
        written = []
        update = tracer._log.writer.update  # type: ignore[union-attr]

        def slow(info: Any) -> None:
            nonlocal now
            now += 1.0
            written.append(len(info.modules))
            update(info)

        monkeypatch.setattr(tracer._log.writer, "update", slow)  # type: ignore[union-attr]
        for number in range(50):
            model = type(f"Net{number}", (nn.Linear,), {})(2, 2)
            model(torch.randn(1, 2)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            now += 1.0
    assert written[:3] == [1, 20, 39]  # each takes one of the 20 seconds
    assert len(tracer.info.modules) == 50


def deepest(call: Callable[[int], object]) -> int:
    """Return how deep something may go before Python gives up."""
    low, high = 10, 400
    while low < high:
        middle = (low + high + 1) // 2
        try:
            call(middle)
            low = middle
        except RecursionError:
            high = middle - 1
    return low


def test_a_model_may_be_nested_as_deep_as_without(tmp_path: Path) -> None:
    def forward(depth: int) -> None:
        model: nn.Module = nn.Linear(2, 2)
        for _ in range(depth):
            model = nn.Sequential(model)
        model(torch.randn(1, 2)).sum().backward()

    limit, depth = sys.getrecursionlimit(), deepest(forward)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradtraceWarning)
        with Tracer(None, tmp_path / "run.parquet") as tracer:
            forward(depth)
    assert len(tracer.info.modules) == depth + 1
    assert sys.getrecursionlimit() == limit


def test_a_limit_of_recursion_that_the_script_sets_stays(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    try:
        with Tracer(None, tmp_path / "one.parquet"), Tracer(None, tmp_path / "two.parquet"):
            sys.setrecursionlimit(5000)
        assert sys.getrecursionlimit() == 5000
    finally:
        sys.setrecursionlimit(limit)


def test_a_limit_of_recursion_that_may_be_all_that_the_stack_bears_is_raised_by_little(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        with Tracer(None, tmp_path / "run.parquet"):
            assert sys.getrecursionlimit() == 11_200
        assert sys.getrecursionlimit() == 10_000
    finally:
        sys.setrecursionlimit(limit)
