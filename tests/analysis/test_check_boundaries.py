"""The rules on outputs, weights and what is near a limit, on rows whose right answer is worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.analysis.rows import NAN, Rows
from tests.analysis.symptoms import brief, outputs, said, weights


@pytest.mark.parametrize(
    ("dtype", "value", "threshold"),
    [
        ("float16", 16376.0, 16376.0),  # 65504 / 4
        ("bfloat16", 8.6e37, 3.3895313892515355e38 / 4),
        ("float32", -8.6e37, 3.4028234663852886e38 / 4),
        ("float64", 5e307, 1.7976931348623157e308 / 4),
    ],
)
def test_a_value_within_a_quarter_of_its_types_limit_is_near_overflow(
    tmp_path: Path, dtype: str, value: float, threshold: float
) -> None:
    rows = Rows()
    outputs(rows, "fc1", [1.0, 16375.0], dtype="float16")
    rows.add("forward", "fc1", "output", dtype=dtype, min=min(value, 0.0), max=max(value, 0.0))
    assert brief(said(tmp_path, rows, "near-overflow")) == [("fc1", 2, 2, abs(value), pytest.approx(threshold))]


def test_of_the_boundaries_that_one_tensor_passes_the_first_is_told_with_its_worst_step(tmp_path: Path) -> None:
    rows = Rows()
    for value in (100.0, 20000.0, 60000.0):
        tensor = rows.add("forward", "fc1", "output", dtype="float16", max=value)
        rows.again("forward", "act", "input", "0", tensor)
        rows.again("evaluation", "act", "output", "0", tensor)
        rows.step += 1
    found = said(tmp_path, rows, "near-overflow")
    assert brief(found) == [("fc1", 1, 1, 20000.0, 16376.0)]
    assert found[0].note == "float16, which ends at 65504; 60000 at step 2"


def test_a_fill_is_not_near_overflow(tmp_path: Path) -> None:
    rows = Rows()
    for _ in range(3):
        rows.add("forward", "fc1", "input", dtype="float16", min=-65504.0, max=0.0)  # the limit itself
        rows.add("forward", "fc2", "input", dtype="float16", min=-60000.0, max=0.0)  # the same in every step
        masked = -3.3895313892515355e38 if rows.step else -1.0  # a mask made in bfloat16
        rows.add("forward", "", "output", dtype="float32", min=masked, max=0.0)
        rows.add("forward", "act", "input", dtype="int64", min=0.0, max=1e38, norm=None)
        rows.step += 1
    assert said(tmp_path, rows, "near-overflow") == []


def test_gradients_under_a_gradient_scaler_may_go_to_the_limit(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("backward", "fc1", "grad_output", dtype="float16", max=40000.0)
    rows.scalar("optimizer", "loss_scale", 65536.0, "0")
    rows.step += 1
    assert said(tmp_path / "scaled", rows, "near-overflow") == []
    rows.add("backward", "fc1", "grad_output", dtype="float16", max=40000.0)
    assert brief(said(tmp_path / "bare", rows, "near-overflow")) == [("fc1", 1, 1, 40000.0, 16376.0)]


def test_an_output_is_dead_from_the_step_since_which_all_its_elements_are_equal(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(8):
        for _ in range(2):
            rows.add("forward", "fc1", "input")
            rows.add("forward", "fc1", "output", min=0.0, max=1.0 if step < 3 else 0.0)
        rows.step += 1
    found = said(tmp_path, rows, "dead-output")
    assert brief(found) == [("fc1", 3, 3, 5.0, 5.0)]
    assert found[0].note == "up to the last: 8 elements that are 0"


@pytest.mark.parametrize(
    "largest",
    [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6 + [1.0], [0.0] * 4 + [1.0] + [0.0] * 4],
)
def test_an_output_that_is_dead_for_four_steps_or_lives_again_is_not_told(tmp_path: Path, largest: list[float]) -> None:
    rows = Rows()
    outputs(rows, "fc1", largest)
    assert said(tmp_path, rows, "dead-output") == []


def test_a_constant_that_is_not_zero_is_dead_too_but_not_a_single_element_nor_an_evaluation(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(6):
        rows.add("input", "", "input")
        rows.add("forward", "fc1", "output", min=0.5, max=0.5)
        rows.add("forward", "act", "output", min=0.5, max=0.5, numel=1)
        rows.add("evaluation", "fc2", "output", min=0.5, max=0.5)
        rows.add("forward", "fc2", "output", min=0.5, max=0.5, **({} if step % 2 else NAN))  # three steps are known
        rows.step += 1
    found = said(tmp_path, rows, "dead-output")
    assert brief(found) == [("fc1", 0, 0, 6.0, 5.0)]
    assert found[0].note == "up to the last: 8 elements that are 0.5"


def test_of_dead_outputs_the_innermost_that_was_fed_something_is_told(tmp_path: Path) -> None:
    rows = Rows()
    dead = {"min": 0.0, "max": 0.0}
    for _ in range(5):
        rows.add("forward", "block", "input")
        rows.add("forward", "block.relu", "input")
        rows.add("forward", "block.relu", "output", **dead)
        rows.add("forward", "block.drop", "input", **dead)
        rows.add("forward", "block.drop", "output", **dead)
        rows.add("forward", "block", "output", **dead)
        rows.step += 1
    assert [one.module for one in said(tmp_path, rows, "dead-output")] == ["block.relu"]


def _first_steps(rows: Rows) -> None:
    """Five steps, in which fc1 has 1 and fc2 3, in the median."""
    for value in (0.5, 1.0, 1.0, 2.0, 0.9):
        rows.add("input", "", "input")
        rows.add("forward", "fc1", "output", min=-value, max=0.0, norm=value)
        rows.add("forward", "fc2", "output", min=0.0, max=3.0 * value, norm=value)
        rows.step += 1


def test_activations_explode_beyond_their_own_first_steps_and_all_others(tmp_path: Path) -> None:
    rows = Rows()
    _first_steps(rows)
    outputs(rows, "fc1", [1.5, 3.0, 30.0, 99.0, 101.0, 1e4])
    # Against 100 times its own 1, which is more than 10 times the 3 of fc2; above twice its own since step 6.
    assert brief(said(tmp_path, rows, "exploding-activations")) == [("fc1", 6, 9, 101.0, 100.0)]


def test_a_branch_that_starts_at_almost_nothing_may_grow(tmp_path: Path) -> None:
    rows = Rows()
    for value in (2.9, 3.0, 3.0, 3.0, 3.1):
        rows.add("input", "", "input")
        rows.add("forward", "fc1", "output", min=0.0, max=1e-3, norm=1e-3)
        rows.add("forward", "fc2", "output", min=0.0, max=value, norm=value)
        rows.step += 1
    outputs(rows, "fc1", [1.0, 29.0])
    assert said(tmp_path / "below", rows, "exploding-activations") == []
    outputs(rows, "fc1", [30.0])
    assert brief(said(tmp_path / "above", rows, "exploding-activations")) == [("fc1", 5, 7, 30.0, 30.0)]


def test_a_mask_is_no_measure_for_other_outputs_and_one_element_is_no_activation(tmp_path: Path) -> None:
    rows = Rows()
    for value in (1.0, 1.1, 1.2, 1.1, 1.0, 500.0):
        rows.add("input", "", "input")
        rows.add("forward", "fc1", "output", min=0.0, max=value, norm=value)
        rows.add("forward", "act", "output", min=-1e9, max=value, norm=1e9)
        rows.add("forward", "", "output", min=0.0, max=value, norm=value, numel=1)
        rows.step += 1
    # The median of fc1's first five is 1.1.
    assert brief(said(tmp_path, rows, "exploding-activations")) == [("fc1", 5, 5, 500.0, pytest.approx(110.0))]


def _updates(
    rows: Rows, steps: int, *, lr: float | None = 0.1, skipped: bool = False, gradient: float | None = 0.25
) -> None:
    for _ in range(steps):
        rows.add("input", "", "input")
        if gradient is not None:
            rows.add("backward", "fc1", "grad", "weight", min=-gradient, max=gradient, norm=gradient)
        if lr is not None:
            rows.scalar("optimizer", "lr", lr, "0.0")
        if skipped:
            rows.skip()
        rows.add("optimizer", "fc1", "param", "weight", min=-1.0, max=2.0, norm=3.0)
        rows.step += 1


def test_a_parameter_with_gradients_that_ten_updates_leave_as_it_was_never_changes(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "fc1", "param", "weight", min=-1.0, max=2.0, norm=3.0)
    _updates(rows, 1, lr=None)
    _updates(rows, 9)
    found = said(tmp_path, rows, "unchanged-parameter")
    assert brief(found) == [("fc1", 0, 9, 10.0, 10.0)]
    assert (found[0].path, found[0].note) == ("weight", "though gradients of up to 0.25 arrived")


def test_a_parameter_whose_gradients_are_all_zero_is_told_as_such(tmp_path: Path) -> None:
    rows = Rows()
    _updates(rows, 10, gradient=0.0)
    assert [one.note for one in said(tmp_path, rows, "unchanged-parameter")] == ["its gradients were all zero"]


@pytest.mark.parametrize("rest", [{}, {"lr": 0.0}, {"skipped": True}])
def test_an_update_that_was_skipped_or_had_no_learning_rate_changes_nothing_rightly(
    tmp_path: Path, rest: dict[str, Any]
) -> None:
    rows = Rows()
    _updates(rows, 9)
    if rest:
        _updates(rows, 9, **rest)
    else:
        rows.scalar("loss", "loss", 1.0)
        rows.add("forward", "fc1", "input")
    assert said(tmp_path, rows, "unchanged-parameter") == []


def test_a_frozen_parameter_and_one_that_changes_at_the_last_bit_are_no_finding(tmp_path: Path) -> None:
    rows = Rows()
    _updates(rows, 12, gradient=None)
    assert said(tmp_path / "frozen", rows, "unchanged-parameter") == []
    rows = Rows()
    _updates(rows, 12)
    rows.add("optimizer", "fc1", "param", "weight", min=-1.0, max=2.0000000000000004, norm=3.0)
    assert said(tmp_path / "changes", rows, "unchanged-parameter") == []


def test_an_update_is_large_when_the_norm_alone_changes_by_a_tenth_three_times(tmp_path: Path) -> None:
    rows = Rows()
    weights(rows, [10.0, 10.5, 12.6, 10.08, 12.6, 13.0])
    # Changes of 0.05, 0.2, -0.2, 0.25 and 0.03: three on end, from step 1.
    assert brief(said(tmp_path, rows, "large-update")) == [("fc1", 1, 1, pytest.approx(0.25), 0.1)]


@pytest.mark.parametrize(
    ("norms", "facts"),
    [
        ([10.0, 12.0, 14.4, 14.5, 17.4, 20.9], {}),  # two on end, twice
        ([10.0, 10.9, 11.8, 12.8, 13.9, 15.1], {}),  # nine hundredths
        ([0.0, 1.0, 2.0, 4.0, 8.0, 16.0], {}),  # started at zero
        ([10.0, 20.0, 40.0, 80.0, 160.0], {"shape": "[8]"}),  # a bias
    ],
)
def test_smaller_or_fewer_changes_and_what_starts_at_zero_are_no_large_updates(
    tmp_path: Path, norms: list[float], facts: dict[str, Any]
) -> None:
    rows = Rows()
    weights(rows, norms, **facts)
    assert said(tmp_path, rows, "large-update") == []


def test_between_steps_with_others_in_between_a_change_is_shared_among_them(tmp_path: Path) -> None:
    def run(gap: int) -> Rows:
        rows = Rows()
        for norm in (10.0, 15.0, 22.5, 33.75, 50.0):
            rows.add("optimizer", "fc1", "param", "weight", min=-norm, max=norm, norm=norm, shape="[2, 4]")
            rows.add("forward", "fc1", "input")
            rows.step += gap
        return rows

    assert said(tmp_path / "a", run(10), "large-update") == []  # half of it in ten updates
    assert brief(said(tmp_path / "b", run(5), "large-update")) == [("fc1", 5, 5, pytest.approx(0.1), 0.1)]


def _small_steps(rows: Rows, lr: float, dtype: str, gradient: float = 0.01, scale: float = 1.0) -> None:
    for _ in range(5):
        rows.add("backward", "fc1", "grad", "weight", norm=gradient * scale, numel=100)
        rows.scalar("optimizer", "lr", lr, "0.0")
        if scale != 1:
            rows.scalar("optimizer", "loss_scale", scale, "0")
        rows.add("optimizer", "fc1", "param", "weight", norm=10.0, numel=100, dtype=dtype)
        rows.step += 1


def test_updates_below_half_the_gap_between_the_types_numbers_are_lost(tmp_path: Path) -> None:
    # Adam would change each of 100 elements by the learning rate: 10 times it, beside a norm of 10.
    rows = Rows()
    _small_steps(rows, 1e-3, "bfloat16", scale=1024.0)
    assert brief(said(tmp_path, rows, "lost-update")) == [("fc1", 0, 4, pytest.approx(1e-3), 2.0**-9)]


@pytest.mark.parametrize(
    ("lr", "dtype", "gradient"),
    [
        (2e-3, "bfloat16", 0.01),  # 2.0e-3 is above 2^-9, 1.95e-3
        (1e-3, "float32", 0.01),
        (1e-3, "bfloat16", 2.0),  # SGD with momentum: 10 * 1e-3 * 2 / 10 is 2e-3
    ],
)
def test_larger_updates_and_finer_types_are_not_lost(tmp_path: Path, lr: float, dtype: str, gradient: float) -> None:
    rows = Rows()
    _small_steps(rows, lr, dtype, gradient)
    assert said(tmp_path, rows, "lost-update") == []
