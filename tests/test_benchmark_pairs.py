"""How the benchmarks time and compare: intervals against published ranks, pairs against a clock made by hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import Training
from benchmarks.pairs import Block, Clocks, Estimate, Rounds, Side, difference, estimate, ratio, steps_for, time_block
from benchmarks.variants import off


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    """Every block collects garbage first, which takes long among all that a test run has loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


class Clock:
    """A clock that moves only when a test says so; its processor runs twice as fast."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clocks = Clocks(lambda: self.now, lambda: 2 * self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


class FakeTraining:
    """A training whose parts take given seconds: forward 1, backward 2, update 4, all times ``slowness``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slowness = 1.0
        self.extra = 0.0
        self.steps = 0
        loss = SimpleNamespace(backward=lambda: clock.wait(2 * self.slowness), item=lambda: 0.0)
        optimizer = SimpleNamespace(step=lambda: self._update(), zero_grad=lambda: None)
        model = cast(nn.Module, None)
        self.training = Training(
            model, cast(torch.optim.Optimizer, optimizer), lambda: cast(Tensor, self._forward(loss))
        )

    def _forward(self, loss: Any) -> Any:
        self.clock.wait((1 + self.extra) * self.slowness)
        return loss

    def _update(self) -> None:
        self.clock.wait(4 * self.slowness)
        self.steps += 1


@pytest.mark.parametrize(
    ("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (30, 10, 21)]
)
def test_the_interval_of_a_median_has_the_ranks_of_the_published_tables(count: int, low: int, high: int) -> None:
    values = [float(rank) for rank in range(1, count + 1)]
    assert estimate(reversed(values)) == Estimate((count + 1) / 2, low, high)


def test_five_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 values have no 95 % interval; it takes 6"):
        estimate([1.0] * 5)


def test_a_block_has_the_mean_of_each_part_without_the_warm_up() -> None:
    clock = Clock()
    fake = FakeTraining(clock)

    @contextmanager
    def slow_to_start() -> Iterator[None]:
        clock.wait(1000)
        yield
        clock.wait(1000)

    block = time_block(fake.training, Side(slow_to_start, warm_up=3), 5, clock.clocks)
    assert block == Block(forward=1000, backward=2000, step=7000, cpu=14000)
    assert fake.steps == 8


def test_a_block_has_at_least_two_steps_and_otherwise_as_many_as_fill_the_time() -> None:
    clock = Clock()
    fake = FakeTraining(clock)
    assert steps_for(fake.training, 1, clock.clocks) == 2
    assert steps_for(fake.training, 22, clock.clocks) == 4


def _rounds(clock: Clock, fake: FakeTraining, sides: dict[str, float], order: list[str]) -> Rounds:
    """Return rounds of sides that each add so many seconds to the forward pass; each also slows the machine down."""

    def side(name: str, extra: float) -> Side:
        @contextmanager
        def watch() -> Iterator[None]:
            order.append(name)
            fake.extra = extra
            yield
            fake.extra = 0.0
            if name != "base":
                fake.slowness *= 1.5

        return Side(watch)

    return Rounds(fake.training, side("base", 0), {name: side(name, extra) for name, extra in sides.items()}, steps=2)


def test_blocks_take_turns_and_a_ratio_is_within_a_pair_however_slow_the_machine_becomes() -> None:
    clock, order = Clock(), list[str]()
    rounds = _rounds(clock, FakeTraining(clock), {"one": 7.0, "two": 14.0}, order)
    rounds.run(6, clock.clocks)
    assert order == ["base", "one", "base", "two"] * 6
    assert ratio(rounds.pairs["one"]) == Estimate(2, 2, 2)
    assert ratio(rounds.pairs["two"], "forward") == Estimate(15, 15, 15)
    assert ratio(rounds.pairs["two"], "backward") == Estimate(1, 1, 1)
    assert [base.step for base, _ in rounds.pairs["one"]] == pytest.approx([7000 * 2.25**n for n in range(6)])
    # Of the growing differences 7000 x 2.25^n the median lies between the third and the fourth.
    assert difference(rounds.pairs["one"]).median == pytest.approx(7000 * (2.25**2 + 2.25**3) / 2)


def test_both_blocks_of_a_pair_have_whole_periods() -> None:
    clock = Clock()
    fake = FakeTraining(clock)
    nothing = off(fake.training, Path())
    Rounds(fake.training, nothing, {"tenth": nothing._replace(period=10)}, steps=12).run(1, clock.clocks)
    assert fake.steps == 2 * (nothing.warm_up + 20)


def test_a_side_that_fails_is_left_out_and_the_others_go_on() -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        raise RuntimeError("no such hook\nand more")
        yield

    clock = Clock()
    fake = FakeTraining(clock)
    nothing = off(fake.training, Path())
    rounds = Rounds(fake.training, nothing, {"broken": Side(broken), "off": nothing}, steps=2)
    rounds.run(7, clock.clocks)
    assert rounds.failures == {"broken": "RuntimeError: no such hook"}
    assert [*rounds.pairs] == ["off"] and len(rounds.pairs["off"]) == 7
