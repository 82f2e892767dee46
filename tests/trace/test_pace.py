"""When the disk is slower than the training, by a clock of the test's own: what is asserted is exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from gradtrace.trace import pace as limits
from gradtrace.trace.pace import BAD_PERIODS, CALM_PERIODS, FEWEST_STEPS, LITTLE, PERIOD, TOO_MUCH, Pace


class Training:
    """Steps of ``compute`` seconds each; ``cost`` says how long a write takes, of a full step or a thinned one."""

    def __init__(self, compute: float, cost: Callable[[int, str], float]) -> None:
        self.now = 1000.0
        self.compute, self.cost = compute, cost
        self.pace = Pace(lambda: self.now)
        self.step = 0
        self.every: list[int] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.compute
            self.every.append(self.pace.every)
            kind = "thinned" if self.step % self.pace.every else "full"
            self.pace.begins()
            self.now += self.cost(self.step, kind)
            self.pace.ended(self.step, kind)
            self.step += 1

    @property
    def first_thinned(self) -> int:
        return next(step for step, every in enumerate(self.every) if every > 1)


def fixed(full: float, thinned: float = 0.001) -> Callable[[int, str], float]:
    return lambda step, kind: full if kind == "full" else thinned


def test_a_disk_that_takes_less_than_a_third_of_the_time_is_left_alone():
    training = Training(compute=0.0675, cost=fixed(0.0325))
    training.run(2000)
    assert set(training.every) == {1}


def test_steps_are_thinned_after_two_periods_of_too_much_and_not_sooner():
    # Steps of an eighth of a second, half of it writing: a period is 16 steps, and the first step is none of any.
    training = Training(compute=0.0625, cost=fixed(0.0625))
    training.run(200)
    assert training.first_thinned == 1 + BAD_PERIODS * int(PERIOD / 0.125)
    assert training.every[training.first_thinned] == 2


def test_steps_that_take_long_are_judged_by_their_number():
    training = Training(compute=10.0, cost=fixed(30.0))
    training.run(20)
    assert training.first_thinned == 1 + BAD_PERIODS * FEWEST_STEPS


@pytest.mark.parametrize("hiccup", [0.2, 2.0, 60.0])
def test_one_hiccup_thins_nothing_however_long(hiccup):
    training = Training(compute=0.01, cost=lambda step, kind: hiccup if step in (0, 500) else 0.0005)
    training.run(3000)
    assert set(training.every) == {1}


def test_hiccups_that_come_back_every_few_seconds_thin_nothing():
    # What a journalling file system does when it commits: every five seconds everybody waits for one and a half.
    training = Training(compute=0.01, cost=lambda step, kind: 1.5 if step % 350 == 349 else 0.0005)
    training.run(7000)
    assert set(training.every) == {1}


@pytest.mark.parametrize("times", [2, 10, 100, 1000])
def test_what_writing_in_full_takes_becomes_less_than_a_third(times):
    training = Training(compute=0.01, cost=fixed(0.01 * times, thinned=0.0005))
    training.run(40_000)
    settled = training.every[-20_000:]
    assert settled[0] > 1
    writing = sum(
        0.01 * times if step % every == 0 else 0 for step, every in zip(range(20_000, 40_000), settled, strict=True)
    )
    assert writing / (writing + 20_000 * 0.0105) < TOO_MUCH


def test_with_a_disk_that_stays_as_slow_the_number_does_not_swing():
    training = Training(compute=0.01, cost=fixed(0.1, thinned=0.0005))
    training.run(60_000)
    assert len(set(training.every[-40_000:])) == 1


def test_when_the_disk_has_recovered_all_steps_are_written_in_full_again():
    speed = {"now": 0.2}
    training = Training(compute=0.01, cost=lambda step, kind: speed["now"] if kind == "full" else speed["now"] / 100)
    training.run(2000)
    level = training.pace.every.bit_length() - 1
    assert level > 1
    speed["now"] = 0.0002
    since = training.step
    training.run(12_000)
    steps_down = [n for n, (one, other) in enumerate(pairwise(training.every)) if n >= since and other < one]
    assert training.every[-1] == 1
    assert [training.every[n] // training.every[n + 1] for n in steps_down] == [2] * level
    period = int(PERIOD / 0.0102)
    assert all(other - one >= CALM_PERIODS * period for one, other in pairwise(steps_down))


def test_a_step_less_thinned_is_never_one_too_many():
    # Just calm enough to write more in full: twice as much writing is still below the limit.
    compute = 0.01
    full = 2 * compute * LITTLE / (1 - LITTLE) * 0.99
    assert full / (full + compute) < TOO_MUCH


def test_where_thinned_steps_take_as_long_nothing_is_thinned_for_nothing():
    # Each write takes its 20 ms, whatever its size: now and then half of the steps of one period are tried.
    training = Training(compute=0.01, cost=fixed(0.02, thinned=0.019))
    training.run(20_000)
    tried = [step for step, every in enumerate(training.every) if every > 1]
    assert {training.every[step] for step in tried} == {2}
    assert 0 < len(tried) < 20_000 / 30


def test_a_watched_step_has_nothing_to_thin_so_its_cost_thins_nothing():
    now = [0.0]
    pace = Pace(lambda: now[0])
    for step in range(2000):
        now[0] += 0.01
        pace.begins()
        now[0] += 0.05
        pace.ended(step, "watched")
        assert pace.every == 1


def test_some_steps_stay_in_full_even_where_that_is_too_much():
    training = Training(compute=0.001, cost=fixed(1000.0, thinned=0.0001))
    training.run(300_000)
    assert max(training.every) == 2**limits.HIGHEST_LEVEL


def test_rows_that_come_in_pieces_are_one_step():
    now = [0.0]
    pace = Pace(lambda: now[0])
    for _ in range(100):  # of a step that takes long, a piece each second
        pace.begins()
        now[0] += 1.0
        pace.ended(7, "full")
    assert pace.every == 1
