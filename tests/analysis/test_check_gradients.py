"""The rules on gradients and on the course of a run, on rows whose right answer is worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.analysis.rows import NAN, Rows
from tests.analysis.symptoms import brief, gradients, losses, said


def test_an_explosion_is_told_from_the_step_in_which_the_growth_began(tmp_path: Path) -> None:
    rows = Rows()
    for norm in [1.0] * 6 + [10.0, 90.0, 1000.0, 9000.0]:
        rows.add("backward", "fc1", "grad", "weight", norm=norm)
        rows.add("backward", "fc2", "grad", "weight", norm=1.0)
        rows.step += 1
    # All together it is sqrt(norm^2 + 1): sqrt(2) usually, 90.006 in step 7, 1000.0005 in step 8.
    assert brief(said(tmp_path, rows, "exploding-gradients")) == [
        (None, 6, 8, pytest.approx(math.sqrt(1000.0**2 + 1)), pytest.approx(100 * math.sqrt(2))),
        ("fc1", 6, 8, 1000.0, 100.0),
    ]


@pytest.mark.parametrize(
    "norms",
    [
        [1.0] * 6 + [10.0, 50.0, 99.9, 1.0],  # just under
        [1.0] * 6 + [1000.0, 1000.0, 1.0],  # two steps are a spike
        [1.0] * 2 + [10.0, 100.0, 1000.0],  # four steps before are no history
    ],
)
def test_what_grows_less_or_faster_or_too_early_is_no_explosion(tmp_path: Path, norms: list[float]) -> None:
    rows = Rows()
    gradients(rows, "fc1", norms)
    rows.step += 1
    gradients(rows, "fc1", [1.0])
    assert said(tmp_path, rows, "exploding-gradients") == []


def test_watched_steps_show_an_explosion_without_the_module(tmp_path: Path) -> None:
    rows = Rows()
    for norm in [1.0] * 6 + [10.0, 90.0, 1000.0]:
        rows.scalar("backward", "grad_norm", norm)
        rows.step += 1
    assert brief(said(tmp_path, rows, "exploding-gradients")) == [(None, 6, 8, 1000.0, 100.0)]


def test_a_loss_scale_that_grows_is_no_explosion_and_a_skipped_step_is_passed_over(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(12):
        scale = 4.0**step
        rows.add("backward", "fc1", "grad", "weight", norm=2.0 * scale)
        rows.scalar("optimizer", "loss_scale", scale, "0")
        rows.step += 1
    for _ in range(3):
        rows.add("backward", "fc1", "grad", "weight", norm=1e9)
        rows.skip()
        rows.step += 1
    for rule in ("exploding-gradients", "gradient-spike"):
        assert said(tmp_path / rule, rows, rule) == []


def test_the_passes_of_a_full_step_are_not_compared_with_the_sum_that_a_watched_one_has(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(20):
        rows.micro_step = 0
        if step < 10:
            for rows.micro_step in range(64):
                rows.add("backward", "fc1", "grad", "weight", norm=1.0)
        else:
            for rows.micro_step in range(64):
                rows.scalar("backward", "grad_norm", 1.0 + rows.micro_step)
        rows.step += 1
    for rule in ("exploding-gradients", "gradient-spike"):
        assert said(tmp_path / rule, rows, rule) == []


def test_a_spike_is_twenty_times_the_median_before_and_names_the_largest_module(tmp_path: Path) -> None:
    rows = Rows()
    for norm in (1.0, 2.0, 1.0, 2.0, 1.0, 19.9, 20.0, 1.0):
        rows.add("backward", "fc1", "grad", "weight", norm=norm)
        rows.add("backward", "fc2", "grad", "weight", norm=0.0)
        rows.step += 1
    # Before step 5 the median of 1 2 1 2 1 is 1; before step 6 that of 1 2 1 2 1 19.9 is 1.5.
    assert said(tmp_path, rows, "gradient-spike") == []
    found = said(tmp_path / "less", rows, "gradient-spike", thresholds={"gradient-spike.factor": 19})
    assert brief(found) == [("fc1", 5, 5, pytest.approx(19.9), 19.0)]


def test_a_jump_that_only_comes_back_to_where_the_run_began_is_no_spike(tmp_path: Path) -> None:
    rows = Rows()
    gradients(rows, "fc1", [40.0] * 5 + [1.0] * 20 + [39.0, 1.0, 41.0])
    assert brief(said(tmp_path, rows, "gradient-spike")) == [("fc1", 27, 27, 41.0, 20.0)]


def _four_modules(rows: Rows, sizes: list[float]) -> None:
    for size in sizes:
        for module, norm in (("", size), ("fc1", 1.0), ("act", 2.0), ("fc2", 4.0)):
            rows.add("backward", module, "grad", "weight", norm=norm * math.sqrt(8), numel=8)
        rows.step += 1


def test_a_module_vanishes_beside_the_largest_one_to_the_end(tmp_path: Path) -> None:
    rows = Rows()
    _four_modules(rows, [1.0, 1.0, 3e-7, 1e-7, 0.0, 1e-7, 3e-7])  # the largest is 4
    found = said(tmp_path, rows, "vanishing-gradients")
    assert brief(found) == [("", 2, 2, pytest.approx(3e-7 / 4), 1e-7)]
    assert "in 5 steps up to the last" in found[0].note


@pytest.mark.parametrize("sizes", [[1.0, 1e-7, 1e-7, 1e-7, 1e-7], [1e-7] * 8 + [1.0], [4.1e-7] * 8])
def test_four_steps_or_a_module_that_recovers_or_lies_just_above_do_not_vanish(
    tmp_path: Path, sizes: list[float]
) -> None:
    rows = Rows()
    _four_modules(rows, sizes)
    assert said(tmp_path, rows, "vanishing-gradients") == []


def _halves(rows: Rows, gradient: float, steps: int, scale: float | None = None) -> None:
    for _ in range(steps):
        rows.add("backward", "fc1", "grad_output", dtype="float16", min=-gradient, max=0.0, norm=gradient)
        if scale is not None:
            rows.scalar("optimizer", "loss_scale", scale, "0")
        rows.step += 1


def test_float16_gradients_underflow_below_the_smallest_normal_number(tmp_path: Path) -> None:
    rows = Rows()
    _halves(rows, 6.2e-5, 2)
    _halves(rows, 6.0e-5, 2, scale=4.0)  # a loss scale that is too small helps nobody
    _halves(rows, 5.0e-5, 1)
    found = said(tmp_path, rows, "float16-underflow")
    assert brief(found) == [("fc1", 2, 2, 6.0e-5, 2.0**-14)]
    assert found[0].tensor == "grad_output"


@pytest.mark.parametrize(("gradient", "steps"), [(6.2e-5, 5), (6.0e-5, 2), (0.0, 5)])
def test_larger_gradients_fewer_steps_and_zeros_do_not_underflow(tmp_path: Path, gradient: float, steps: int) -> None:
    rows = Rows()
    _halves(rows, 1.0, 2)
    _halves(rows, gradient, steps)
    assert said(tmp_path, rows, "float16-underflow") == []


def _scales(rows: Rows, scales: list[float]) -> None:
    for scale in scales:
        rows.scalar("optimizer", "loss_scale", scale, "0")
        rows.step += 1


def test_a_loss_scale_collapses_when_it_is_a_thousandth_or_below_one(tmp_path: Path) -> None:
    rows = Rows()
    _scales(rows, [65536.0, 65536.0, *(65536.0 / 2**n for n in range(1, 12))])
    # 65536 / 1024 = 64 comes with the tenth halving, in step 11; the first halving is in step 2.
    assert brief(said(tmp_path / "a", rows, "loss-scale-collapse")) == [(None, 2, 11, 64.0, 64.0)]
    rows = Rows()
    _scales(rows, [2.0, 1.0, 0.5, 0.25])
    assert brief(said(tmp_path / "b", rows, "loss-scale-collapse")) == [(None, 1, 2, 0.5, 1.0)]
    rows = Rows()
    _scales(rows, [65536.0, *(65536.0 / 2**n for n in range(1, 10)), 256.0])
    assert said(tmp_path / "c", rows, "loss-scale-collapse") == []


def _skips(rows: Rows, steps: str) -> None:
    """Add a step for each letter; s is one that was skipped."""
    for letter in steps:
        rows.scalar("loss", "loss", 1.0)
        if letter == "s":
            rows.skip()
        rows.step += 1


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ("ssssssssss.", [(None, 0, 9, 10.0, 10.0)]),
        ("sssssssss.....", []),
        ("ss..sss..", [(None, 4, 6, 3.0, 3.0)]),
        ("ss..ss..s..", []),
        ("." + "......s" * 11, [(None, 7, 70, 10.0, 10.0)]),  # the tenth of them is step 70
        ("." + "...........s" * 12, []),  # nine of a hundred
    ],
)
def test_skipped_steps_are_counted_at_the_start_later_and_by_the_hundred(
    tmp_path: Path, steps: str, found: list[tuple[None, int, int, float, float]]
) -> None:
    rows = Rows()
    _skips(rows, steps)
    assert brief(said(tmp_path, rows, "skipped-steps")) == found


def test_a_loss_spike_is_beyond_the_scatter_and_twice_the_usual(tmp_path: Path) -> None:
    before = [2.0, 2.1] * 5
    # Median 2.05, median distance 0.05: ten standard deviations are 0.74, the usual loss once more is 2.05.
    rows = Rows()
    losses(rows, [*before, 4.2, 5.0, 2.0])
    assert brief(said(tmp_path / "a", rows, "loss-spike")) == [(None, 10, 10, 4.2, pytest.approx(4.1))]
    rows = Rows()
    losses(rows, [*before, 4.0, 2.0])
    assert said(tmp_path / "b", rows, "loss-spike") == []


def test_a_loss_that_has_come_down_to_nothing_may_vary(tmp_path: Path) -> None:
    rows = Rows()
    losses(rows, [10.0] * 5 + [0.01] * 20 + [1.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 1.02])
    assert brief(said(tmp_path, rows, "loss-spike")) == [(None, 32, 32, 1.02, pytest.approx(1.01))]


def test_a_loss_is_stuck_when_it_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    rows = Rows()
    losses(rows, [3.0, 2.5, *[2.3] * 10])
    assert brief(said(tmp_path / "a", rows, "loss-stuck")) == [(None, 2, 11, 10.0, 10.0)]
    rows = Rows()
    losses(rows, [3.0, 2.5, 2.3, *[2.3] * 8, 2.2999])
    assert said(tmp_path / "b", rows, "loss-stuck") == []


def test_a_loss_is_stuck_when_all_fifths_of_a_hundred_steps_are_alike(tmp_path: Path) -> None:
    # Each fifth has 20 steps, half a tenth above and half a tenth below: its median is its middle.
    def noisy(middles: list[float]) -> list[float]:
        return [middle + (0.1 if step % 2 else -0.1) for middle in middles for step in range(20)]

    rows = Rows()
    losses(rows, noisy([2.3, 2.3, 2.295, 2.3, 2.29]))
    found = said(tmp_path / "a", rows, "loss-stuck")
    assert brief(found) == [(None, 0, 99, pytest.approx(0.01 / 2.3), 0.01)]
    rows = Rows()
    losses(rows, noisy([2.3, 2.3, 2.29, 2.28, 2.27]))
    assert said(tmp_path / "b", rows, "loss-stuck") == []


def test_a_learning_rate_of_zero_counts_when_all_groups_have_it(tmp_path: Path) -> None:
    def run(rates: list[float]) -> Rows:
        rows = Rows()
        for rate in [0.1, *rates, 0.1]:
            rows.scalar("optimizer", "lr", 0.0, "0.0")
            rows.scalar("optimizer", "lr", rate, "0.1")
            rows.step += 1
        return rows

    assert brief(said(tmp_path / "a", run([0.0] * 10), "no-learning-rate")) == [(None, 1, 10, 10.0, 10.0)]
    assert said(tmp_path / "b", run([0.0] * 9 + [1e-9]), "no-learning-rate") == []


def test_values_that_are_not_finite_are_passed_over(tmp_path: Path) -> None:
    rows = Rows()
    for _ in range(8):
        rows.scalar("loss", "loss", 1.0 + rows.step)
        rows.add("backward", "fc1", "grad", "weight", norm=1.0)
        rows.step += 1
    for _ in range(8):
        rows.scalar("loss", "loss", None, **NAN)
        rows.add("backward", "fc1", "grad", "weight", norm=1e6, **NAN)
        rows.step += 1
    for rule in ("exploding-gradients", "gradient-spike", "loss-spike", "loss-stuck"):
        assert said(tmp_path / rule, rows, rule) == []
