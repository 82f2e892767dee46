"""One test for each class of verdict, on the network root(fc1, act, fc2) of ``rows.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtrace.analysis.verdict import first_nan
from gradtrace.analysis.verdict_model import Cause, Verdict
from gradtrace.trace.runinfo import ModuleInfo
from tests.analysis.rows import (
    ALL_NAN,
    INF,
    MODULES,
    NAN,
    PARAMS,
    Rows,
    backward,
    forward,
    healthy,
    open_rows,
    update,
)

_REST_OF_FORWARD = ("fc1_in", "fc1", "act_in", "act", "fc2_in", "fc2", "out")


def _run(steps: int = 2) -> Rows:
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, steps)
    return rows


def _bad_from(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Make a forward boundary bad with ``values``, and all after it NaN."""
    after = _REST_OF_FORWARD[_REST_OF_FORWARD.index(name) + 1 :]
    return {name: values, **dict.fromkeys(after, ALL_NAN)}


def _everything_after(rows: Rows) -> None:
    """Add the loss, backward pass and update of a forward pass that ended in NaN."""
    names = ("out", "fc2", "fc2_in", "fc2_grad", "act", "act_in", "fc1", "fc1_grad")
    backward(rows, None, NAN, **dict.fromkeys(names, ALL_NAN))
    update(rows, fc1=ALL_NAN, fc2=ALL_NAN)


def _verdict(tmp_path: Path, rows: Rows, **info: Any) -> Verdict:
    with open_rows(tmp_path, rows, **info) as run:
        return first_nan(run)


def _answer(verdict: Verdict) -> tuple[int, str, str | None, str, str]:
    answer = verdict.to_dict()
    return answer["step"], answer["phase"], answer["module"], answer["tensor"], answer["path"]


def test_a_batch_that_arrived_bad_is_an_input_failure(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, batch=NAN, **_bad_from("fc1_in", NAN))
    _everything_after(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "input", "", "input", "0")
    assert verdict.to_dict()["reached"] == ["loss", "grad", "param"]


def test_a_parameter_that_was_bad_from_the_start_is_a_parameter_failure_once_it_is_used(
    tmp_path: Path,
) -> None:
    rows = Rows()
    rows.start(("fc1", "param", "weight"))
    rows.start(("fc2", "param", "weight"), **NAN)
    for _ in range(2):  # fc2 keeps its NaN unused: its output stays finite
        forward(rows)
        backward(rows)
        update(rows, fc2=NAN)
        rows.step += 1
    forward(rows, fc2=ALL_NAN, out=ALL_NAN)
    _everything_after(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (0, "parameter", "fc2", "param", "weight")
    assert verdict.finding is not None
    assert (verdict.finding.seen.step, verdict.finding.seen.module) == (2, "fc2")


def test_a_parameter_that_something_else_than_the_optimizer_wrote_is_a_parameter_failure(
    tmp_path: Path,
) -> None:
    rows = _run()
    forward(rows)
    rows.scalar("loss", "loss", 1.0)
    rows.add("backward", "fc2", "grad", "weight")  # fc1 is frozen
    update(rows, fc1=NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "parameter", "fc1", "param", "weight")
    assert verdict.finding is not None and verdict.finding.cause is Cause.MOVED_IN


def test_finite_inputs_and_a_bad_output_were_made_inside_that_module(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, **_bad_from("act", INF))
    _everything_after(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "act", "output", "0")
    assert verdict.to_dict()["kind"] == "Infinity"
    assert verdict.to_dict()["module_type"] == "ReLU"


def test_a_bad_input_after_finite_outputs_was_made_by_the_enclosing_modules_code(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, **_bad_from("act_in", INF))
    _everything_after(rows)
    verdict = _verdict(tmp_path, rows)
    # it leaves the root, whose code made it, through the root's output
    assert _answer(verdict) == (2, "forward", "", "output", "0")
    finding = verdict.finding
    assert finding is not None and finding.maker == "" and finding.cause is Cause.BETWEEN
    assert (finding.seen.module, finding.seen.tensor) == ("act", "input")
    assert verdict.context[-1] == finding.seen


def test_code_between_two_models_is_outside_any_module(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    rows.add("forward", "critic", "input", **NAN)
    rows.add("forward", "critic", "output", **ALL_NAN)
    rows.scalar("loss", "loss", None, **NAN)
    verdict = _verdict(tmp_path, rows, modules=[*MODULES, ModuleInfo("critic", "Critic", root=True)])
    assert _answer(verdict) == (2, "forward", "critic", "input", "0")
    assert verdict.finding is not None and verdict.finding.maker is None


def test_a_bad_loss_after_finite_outputs_was_made_by_the_loss_code(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    _everything_after(rows)
    assert _answer(_verdict(tmp_path, rows)) == (2, "loss", None, "loss", "")


def test_finite_grad_output_and_bad_grad_input_were_made_inside_that_module(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, act_in=NAN, fc1=NAN, fc1_grad=NAN)
    update(rows, fc1=NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "backward", "act", "grad_input", "0")
    assert verdict.to_dict()["affected"] == {"params": 1, "grads": 1, "modules": 0}


def test_a_bad_grad_output_after_finite_ones_was_made_between_modules(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    rows.add("forward", "pool", "input")
    rows.add("forward", "pool.score", "input")
    rows.add("forward", "pool.score", "output")
    rows.add("forward", "pool", "output")
    rows.add("forward", "", "output")
    rows.scalar("loss", "loss", 1.0)
    rows.add("backward", "", "grad_output")
    rows.add("backward", "pool", "grad_output")
    rows.add("backward", "pool.score", "grad_output", **NAN)
    rows.add("backward", "pool.score", "grad", "weight", **NAN)  # this is the record that matters first
    rows.add("backward", "pool.score", "grad_input", **NAN)
    leaves = rows.add("backward", "pool", "grad_input", **NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "backward", "pool", "grad_input", "0")
    assert verdict.to_dict()["seq"] == leaves.seq
    finding = verdict.finding
    assert finding is not None and finding.seen.module == "pool.score"


def test_a_bad_gradient_at_the_root_was_made_by_the_loss_codes_backward(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    names = ("out", "fc2", "fc2_in", "fc2_grad", "act", "act_in", "fc1", "fc1_grad")
    backward(rows, **dict.fromkeys(names, NAN))
    update(rows, fc1=NAN, fc2=NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "backward", "", "grad_output", "0")
    assert verdict.finding is not None and verdict.finding.maker is None


def test_only_a_bad_gradient_is_that_modules_parameter_gradient(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, fc2_grad=INF)
    update(rows, fc2=NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "backward", "fc2", "grad", "weight")
    assert verdict.to_dict()["reached"] == ["grad", "param"]


def test_a_gradient_that_arrived_finite_was_changed_before_the_optimizer_step(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows)
    rows.add("optimizer", "fc2", "grad", "weight", **NAN)
    update(rows, fc2=NAN)
    assert _answer(_verdict(tmp_path, rows)) == (2, "optimizer", "fc2", "grad", "weight")


def test_finite_gradients_and_a_bad_parameter_were_made_by_the_update(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows)
    update(rows, fc2=INF)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "optimizer", "fc2", "param", "weight")
    assert verdict.to_dict()["reached"] == ["param"]


def test_a_learning_rate_of_nan_is_named_with_the_parameter_that_it_spoiled(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows)
    update(rows, None, NAN, fc1=ALL_NAN, fc2=ALL_NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "optimizer", "fc1", "param", "weight")
    assert verdict.finding is not None and verdict.finding.cause is Cause.LEARNING_RATE
    assert "scheduler" in verdict.hints[0]


def test_a_buffer_that_went_bad_while_the_output_stayed_finite_is_made_in_forward(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows)
    update(rows)
    rows.add("optimizer", "act", "buffer", "running_var", **NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "act", "buffer", "running_var")
    assert verdict.to_dict()["reached"] == ["buffer"]


def test_nothing_wrong_is_found_false_and_the_rest_null_or_empty(tmp_path: Path) -> None:
    verdict = _verdict(tmp_path, _run())
    answer = verdict.to_dict()
    assert answer.pop("schema_version") == 1
    assert answer.pop("found") is False
    run = answer.pop("run")
    assert (run["steps"], run["end"], run["missing"]) == (2, "completed", [])
    nested = {**answer.pop("affected"), **answer.pop("confirmation")}
    assert set(nested.values()) == {None}
    assert all(value is None or value == [] for value in answer.values())


def test_an_empty_run_has_nothing_to_say(tmp_path: Path) -> None:
    verdict = _verdict(tmp_path, Rows())
    assert not verdict.found
    assert verdict.run.steps == 0


@pytest.mark.parametrize(
    ("values", "kind"), [(NAN | INF, "NaN"), (INF, "Infinity"), ({"neginf_count": 2}, "-Infinity")]
)
def test_kind_is_the_worst_that_the_boundary_holds(tmp_path: Path, values: dict[str, Any], kind: str) -> None:
    rows = _run()
    forward(rows, **_bad_from("fc2", values))
    _everything_after(rows)
    assert _verdict(tmp_path, rows).to_dict()["kind"] == kind
