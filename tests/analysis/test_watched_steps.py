"""The verdict of runs in which most steps were only watched: what their few rows say, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest

from gradtrace.analysis.evidence import Evidence
from gradtrace.analysis.verdict import first_nan
from gradtrace.trace.schema import Record
from tests.analysis.rows import ALL_NAN, NAN, Rows, backward, forward, healthy, open_rows, update


def watched(rows: Rows, steps: int = 1, **bad: Any) -> None:
    """Add watched steps; ``bad`` gives values to out, loss, norm, and rows to grad, param and buffer."""
    for _ in range(steps):
        rows.add("forward", "", "output", **bad.get("out", {}))
        rows.scalar("loss", "loss", None if "loss" in bad else 1.0, **bad.get("loss", {}))
        if "grad" in bad:
            rows.add("backward", "fc1", "grad", "weight", **bad["grad"])
        norm = bad.get("norm")
        values = {"dtype": "float64", "shape": "[]", "numel": 1, "min": 2.0, "max": 2.0, "norm": 2.0}
        if norm:
            values |= norm | dict.fromkeys(("min", "max", "norm"))
        rows.add("backward", None, "grad_norm", "", **values)
        rows.scalar("optimizer", "lr", 0.1, "0.0")
        for tensor in ("param", "buffer"):
            if tensor in bad:
                rows.add("optimizer", "fc1", tensor, "weight", **bad[tensor])
        rows.step += 1


def test_a_norm_that_is_not_finite_is_never_the_answer(tmp_path):
    rows = Rows()
    healthy(rows, 1)
    watched(rows, norm=NAN)
    watched(rows)
    with open_rows(tmp_path, rows) as run:
        verdict = first_nan(run)
    assert verdict.finding is None
    assert verdict.contained == ()


def test_the_gradient_is_accused_and_not_the_norm_though_it_comes_first(tmp_path):
    rows = Rows()
    healthy(rows, 2)
    rows.add("backward", None, "grad_norm", "", numel=1, shape="[]", **(ALL_NAN | {"nan_count": 1}))
    bad = rows.add("backward", "fc1", "grad", "weight", **NAN)
    with open_rows(tmp_path, rows) as run:
        verdict = first_nan(run)
        assert Evidence(run).watched_steps == {0: [2]}
    assert verdict.finding is not None
    assert verdict.finding.row == bad
    assert [incident.reached for incident in verdict.incidents] == [("grad",)]


def test_a_gradient_of_a_watched_step_comes_with_a_remark_and_the_command_that_shows_more(tmp_path):
    rows = Rows()
    healthy(rows, 2)
    watched(rows, 3)
    watched(rows, grad=NAN, norm=NAN, param=NAN)
    with open_rows(tmp_path, rows, command=["train.py"]) as run:
        verdict = first_nan(run)
    assert verdict.finding is not None
    assert (verdict.finding.row.step, verdict.finding.row.tensor) == (5, "grad")
    [candidate] = verdict.candidates
    assert candidate.why == "step 5 was only watched: which module inside made it is not recorded"
    assert candidate.next == "gradtrace record --steps 5:6 train.py"
    # The model's two parameters are known from its modules: the finite ones have no rows.
    assert (verdict.affected.grads, verdict.affected.all_grads) == (1, 2)
    assert (verdict.affected.params, verdict.affected.all_params) == (1, 2)


def test_the_history_comes_from_the_steps_that_were_captured_in_full(tmp_path):
    rows = Rows()
    healthy(rows, 3)
    watched(rows, 20)
    forward(rows)
    backward(rows, fc1_grad=NAN)
    update(rows)
    with open_rows(tmp_path, rows) as run:
        verdict = first_nan(run)
    assert [row.step for row in verdict.history] == [0, 1, 2]
    assert {(row.module, row.tensor) for row in verdict.history} == {("fc1", "grad")}


def failing(rows: Rows) -> None:
    """Add a step whose output of fc1 is NaN, captured in full."""
    rows.add("input", "", "input")
    rows.add("forward", "fc1", "input")
    rows.add("forward", "fc1", "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)


@pytest.mark.parametrize(
    ("between", "phase"), [("bad", "parameter"), ("good", "forward"), ("skipped", "parameter"), ("none", "parameter")]
)
def test_a_parameter_without_a_row_in_a_watched_step_was_finite_then(tmp_path, between, phase):
    rows = Rows()
    rows.start(("fc1", "param", "weight"), **NAN)  # bad from the start, which is no incident
    watched(rows, param=NAN)
    if between == "bad":
        watched(rows, param=NAN)
    elif between == "good":
        watched(rows)
    elif between == "skipped":
        rows.skip()
        watched(rows)
    failing(rows)
    with open_rows(tmp_path, rows) as run:
        verdict = first_nan(run)
    assert verdict.finding is not None
    assert verdict.finding.cause.phase == phase


def test_state_that_was_mended_in_a_watched_step_started_again_after_it(tmp_path):
    rows = Rows()
    watched(rows, param=NAN)
    watched(rows, 2)
    watched(rows, 3, param=NAN)
    with open_rows(tmp_path, rows) as run:
        evidence = Evidence(run)
        last = Record(9, 10_000, "forward", "output")
        [state] = evidence.bad_state_before(last._replace(step=6))
        assert state.step == 5
        assert evidence.start_of(state).step == 3
