"""Failures as they are met in public reports: what a recording of each would hold, and the right verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace.analysis.verdict import first_nan
from gradtrace.trace.runinfo import ModuleInfo
from tests.analysis.rows import ALL_NAN, INF, NAN, NEGINF, Rows, open_rows

_SOFTMAX_INPUT: dict[str, Any] = {"neginf_count": 3}


def _check(tmp_path: Path, rows: Rows, *roots: str) -> dict[str, Any]:
    names = dict.fromkeys(row.module for row in rows.records if row.module is not None)
    modules = [ModuleInfo(name, "Module", root=name in (roots or ("",)), calls=1) for name in names]
    with open_rows(tmp_path, rows, modules=modules) as run:
        return first_nan(run).to_dict()


def _is(answer: dict[str, Any], step: int, phase: str, module: str | None, tensor: str, kind: str) -> bool:
    keys = ("step", "phase", "module", "tensor", "kind")
    return tuple(answer[key] for key in keys) == (step, phase, module, tensor, kind)


def _state(rows: Rows, phase: str, *names: str, **values: Any) -> None:
    for name in names:
        rows.add(phase, name, "param", "weight", **values)


def test_distance_of_two_equal_vectors(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(2):
        bad = NAN if step else {}
        rows.step = step
        rows.add("input", "", "input")
        for call in (0, 1):
            rows.add("forward", "distance", "input", "0", call=call)
            rows.add("forward", "distance", "output", call=call)
        rows.add("forward", "", "output", "0")
        rows.scalar("loss", "loss", 1.0)
        rows.add("backward", "distance", "grad_output", call=1)
        rows.add("backward", "distance", "grad_input", call=1)
        rows.add("backward", "distance", "grad_output", call=0)
        rows.add("backward", "distance", "grad_input", call=0, **bad)
        rows.add("backward", "encoder", "grad_output", **bad)
        rows.add("backward", "encoder", "grad", "weight", **bad)
        _state(rows, "optimizer", "encoder", **bad)
    answer = _check(tmp_path, rows)
    assert _is(answer, 1, "backward", "distance", "grad_input", "NaN")
    assert answer["call"] == 0


def test_masked_loss_entries_poison_the_gradient_of_the_output(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input")
    rows.add("forward", "decoder", "input")
    out = rows.add("forward", "decoder", "output")
    rows.again("forward", "", "output", "0", out)
    rows.scalar("loss", "loss", 0.7)
    for module in ("", "decoder"):  # both lie on one edge of the graph
        rows.add("backward", module, "grad_output", **NAN)
    rows.add("backward", "decoder", "grad", "weight", **NAN)
    assert _is(_check(tmp_path, rows), 0, "backward", "", "grad_output", "NaN")


def test_only_one_of_two_models_in_one_loss_gets_a_bad_gradient(tmp_path: Path) -> None:
    rows = Rows()
    for student in ("student_a", "student_b"):
        rows.add("input", student, "input")
        rows.add("forward", student, "output")
    rows.scalar("loss", "loss", 0.7)
    rows.add("backward", "student_a", "grad_output")
    rows.add("backward", "student_b", "grad_output", **NAN)
    rows.add("backward", "student_b.0", "grad", "weight", **NAN)
    answer = _check(tmp_path, rows, "student_a", "student_b")
    assert _is(answer, 0, "backward", "student_b", "grad_output", "NaN")


def test_gradient_of_a_recurrent_cell_explodes_and_clipping_spreads_it(tmp_path: Path) -> None:
    rows = Rows()
    for call in range(3):
        rows.add("forward", "cell", "input", call=call)
        rows.add("forward", "cell.rec", "input", call=call)
        rows.add("forward", "cell.rec", "output", call=call)
        rows.add("forward", "cell", "output", call=call)
    rows.scalar("loss", "loss", 1.0)
    rows.add("backward", "readout", "grad", "weight")
    for call, bad in ((2, {}), (1, INF), (0, ALL_NAN)):
        arrives = ALL_NAN if call == 0 else {}
        rows.add("backward", "cell", "grad_output", call=call, **arrives)
        rows.add("backward", "cell.rec", "grad_output", call=call, **arrives)
        rows.add("backward", "cell.rec", "grad_input", call=call, **bad)
        rows.add("backward", "cell", "grad_input", call=call, **bad)
    rows.add("backward", "cell.rec", "grad", "weight", **ALL_NAN)
    rows.add("optimizer", "readout", "grad", "weight", **ALL_NAN)
    _state(rows, "optimizer", "readout", "cell.rec", **ALL_NAN)
    answer = _check(tmp_path, rows)
    assert _is(answer, 0, "backward", "cell.rec", "grad_input", "Infinity")
    assert answer["call"] == 1


def test_reentrant_checkpoint_overflows_without_grad_and_again_in_backward(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input")
    rows.add("forward", "stages.1", "input")
    rows.add("forward", "stages.1.lin", "input")
    rows.add("forward", "stages.1.lin", "output")
    rows.add("forward", "stages.1", "output", **INF)
    rows.add("forward", "out", "input", **INF)
    rows.add("forward", "out", "output", **INF)
    rows.add("forward", "", "output", **INF)
    rows.scalar("loss", "loss", None, **INF)
    rows.add("backward", "", "grad_output")
    rows.add("recompute", "stages.1", "input")
    rows.add("recompute", "stages.1", "output", **INF)
    rows.add("backward", "stages.1.lin", "grad", "weight", **NAN)
    assert _is(_check(tmp_path, rows), 0, "forward", "stages.1", "output", "Infinity")


def test_loss_inside_the_model_with_every_label_ignored(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input", "input_ids")
    rows.add("forward", "lm_head", "input")
    logits = rows.add("forward", "lm_head", "output")
    rows.add("forward", "", "output", "loss", shape="[]", numel=1, nan_count=1, min=None, max=None, norm=None)
    rows.again("forward", "", "output", "logits", logits)
    rows.scalar("loss", "loss", None, **NAN)
    rows.add("backward", "lm_head", "grad", "weight")
    answer = _check(tmp_path, rows)
    assert _is(answer, 0, "forward", "", "output", "NaN")
    assert answer["path"] == "loss"
    assert answer["reached"] == ["loss"]


def test_mask_of_minus_infinity_is_fatal_before_binary_cross_entropy(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(2):
        rows.step = step
        bad, loss = (NEGINF, NAN) if step else ({}, {})
        rows.add("input", "", "input")
        rows.add("forward", "hide", "input")
        hidden = rows.add("forward", "hide", "output", **bad)
        rows.again("forward", "", "output", "0", hidden)
        rows.again("forward", "criterion", "input", "0", hidden)
        rows.add("forward", "criterion", "output", **loss)
        rows.scalar("loss", "loss", None if step else 1.0, **loss)
    assert _is(_check(tmp_path, rows, "", "criterion"), 1, "forward", "hide", "output", "-Infinity")


def test_minus_infinity_before_softmax_in_every_step_is_no_failure(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(3):
        rows.step = step
        rows.add("input", "", "input")
        scores = rows.add("forward", "scores", "output", **_SOFTMAX_INPUT)
        rows.again("forward", "softmax", "input", "0", scores)
        rows.add("forward", "softmax", "output")
        rows.add("forward", "", "output")
        rows.scalar("loss", "loss", 1.0)
    assert _check(tmp_path, rows)["found"] is False


def test_a_fully_masked_row_after_healthy_masks_is_made_by_the_softmax(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(3):
        rows.step = step
        bad = NAN if step == 2 else {}
        rows.add("input", "", "input")
        scores = rows.add("forward", "scores", "output", **_SOFTMAX_INPUT)
        rows.again("forward", "softmax", "input", "0", scores)
        rows.add("forward", "softmax", "output", **bad)
        rows.add("forward", "", "output", **bad)
        rows.scalar("loss", "loss", None if bad else 1.0, **bad)
    assert _is(_check(tmp_path, rows), 2, "forward", "softmax", "output", "NaN")


def test_closures_of_lbfgs_run_forward_several_times_in_one_step(tmp_path: Path) -> None:
    rows = Rows()
    for micro_step in range(3):
        rows.micro_step = micro_step
        bad = INF if micro_step == 2 else {}
        rows.add("input", "", "input")
        rows.add("forward", "rate", "input")
        rows.add("forward", "rate", "output")
        rows.add("forward", "mix", "input", **bad)  # exp, in the root's own code
        rows.add("forward", "mix", "output", **bad)
        rows.add("forward", "", "output", **bad)
        rows.scalar("loss", "loss", None if bad else 1.0, **bad)
    answer = _check(tmp_path, rows)
    assert _is(answer, 0, "forward", "", "output", "Infinity")
    assert answer["micro_step"] == 2


def test_half_precision_product_overflows_and_the_norm_turns_it_to_nan(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input")
    rows.add("forward", "block", "input")
    rows.add("forward", "block.wo", "input")
    over = rows.add("forward", "block.wo", "output", dtype="float16", **INF)
    rows.again("forward", "block", "output", "0", over)
    rows.again("forward", "norm", "input", "0", over)
    rows.add("forward", "norm", "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    answer = _check(tmp_path, rows)
    assert _is(answer, 0, "forward", "block.wo", "output", "Infinity")
    assert any("float16" in hint for hint in answer["hints"])


def test_residual_sum_overflows_though_every_layer_fits(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input")
    rows.add("forward", "layer", "input")
    rows.add("forward", "layer.fc", "input")
    rows.add("forward", "layer.fc", "output")
    rows.add("forward", "layer", "output", **INF)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    assert _is(_check(tmp_path, rows), 0, "forward", "layer", "output", "Infinity")


def test_scaler_skips_every_step_because_the_forward_overflows(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(4):
        rows.step = step
        bad = NAN if step >= 2 else {}
        rows.add("input", "", "input")
        rows.add("forward", "attn", "input")
        rows.add("forward", "attn", "output", **bad)
        rows.add("forward", "", "output", **bad)
        rows.scalar("loss", "loss", None if bad else 1.0, **bad)
        rows.add("backward", "attn", "grad", "weight", **bad)
        if bad:
            rows.skip()
    answer = _check(tmp_path, rows)
    assert _is(answer, 2, "forward", "attn", "output", "NaN")
    assert answer["reached"] == ["loss"]
    assert answer["handled"] is False


def test_adam_in_half_precision_spoils_all_parameters_at_the_first_step(tmp_path: Path) -> None:
    rows = Rows()
    _state(rows, "input", "down", "up")
    rows.add("input", "", "input")
    rows.add("forward", "", "output")
    rows.scalar("loss", "loss", 1.0)
    for module in ("up", "down"):
        rows.add("backward", module, "grad", "weight")
    rows.scalar("optimizer", "lr", 1e-4, "0.0")
    _state(rows, "optimizer", "down", "up", dtype="float16", **INF)
    assert _is(_check(tmp_path, rows), 0, "optimizer", "down", "param", "Infinity")


def test_nan_in_an_unused_part_of_the_output_poisons_the_gradients(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input")
    rows.add("forward", "ratio", "input")
    rows.add("forward", "ratio", "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", 1.0)
    rows.add("backward", "", "grad_output")
    rows.add("backward", "ratio", "grad_output")
    rows.add("backward", "ratio", "grad_input", **NAN)
    rows.add("backward", "noise", "grad", "weight", **NAN)
    answer = _check(tmp_path, rows)
    assert _is(answer, 0, "forward", "ratio", "output", "NaN")
    assert answer["reached"] == ["grad"]


def test_nan_labels_that_the_criterion_leaves_out_are_no_failure(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(2):
        rows.step = step
        rows.add("input", "", "input")
        logits = rows.add("forward", "", "output")
        rows.again("forward", "criterion", "input", "0", logits)
        rows.add("input", "criterion", "input", "1", **NAN)
        rows.add("forward", "criterion", "output")
        rows.scalar("loss", "loss", 1.0)
    answer = _check(tmp_path, rows, "", "criterion")
    assert answer["found"] is False
    assert [(row["module"], row["path"], row["fate"]) for row in answer["contained"]] == [
        ("criterion", "1", "tolerated")
    ]


def test_sentinels_in_observer_buffers_are_no_failure(tmp_path: Path) -> None:
    rows = Rows()
    rows.start(("obs", "buffer", "min_val"), ("spare", "buffer", "min_val"), **INF)
    rows.add("forward", "", "output")
    rows.add("optimizer", "obs", "buffer", "min_val")
    rows.add("optimizer", "spare", "buffer", "min_val", **INF)
    assert _check(tmp_path, rows)["found"] is False
