"""Which operation of a replay explains a verdict, and what is said where none can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrace.analysis.births import op_name, read_births
from gradtrace.analysis.confirmation import explain
from gradtrace.analysis.run import open_run
from gradtrace.analysis.verdict import first_nan
from gradtrace.analysis.verdict_model import Cause, Finding
from gradtrace.trace.confirmation import Boundary, SourceLine
from gradtrace.trace.schema import Record
from tests.analysis.rows import (
    ALL_NAN,
    INF,
    MODULES,
    NAN,
    NEGINF,
    PARAMS,
    Rows,
    backward,
    forward,
    healthy,
    open_rows,
    update,
)
from tests.traces import write_run

_OUT = Boundary("act", 0, "0")
_ROOT_OUT = Boundary("", 0, "0")


def _finding(cause: Cause, row: Record, seen: Record | None = None, maker: str | None = None) -> Finding:
    return Finding(cause, row, seen or row, maker)


def _op(finding: Finding, rows: Rows) -> str | None:
    rows.replay()
    birth = explain(finding, _of_replay(rows.records), 0).birth
    return birth.op if birth else None


def _of_replay(records: Sequence[Record]) -> list[Record]:
    return [row for row in records if row.phase in ("replay", "event")]


def test_operands_belong_to_the_result_that_follows_them() -> None:
    rows = Rows()
    zero = {"min": 0.0, "max": 0.0}
    rows.birth("SqrtBackward0", "a", "grad_input", operands=[("grad_output", "0", {}), ("input", "saved.result", zero)])
    rows.birth("aten.exp", None, operands=[("input", "self", {})])
    rows.birth("PowBackward0", "b")
    found = [(birth.op, [row.path for row in birth.operands]) for birth in read_births(rows.records)]
    assert found == [("SqrtBackward0", ["0", "saved.result"]), ("aten.exp", ["self"]), ("PowBackward0", [])]


def test_a_forward_value_was_made_by_the_first_operation_that_flowed_into_it() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NAN)
    rows.birth("LogBackward0", "fc1", flows_to=[Boundary("fc1", 0, "0")])  # died: never came to act
    rows.birth("DivBackward0", "act", flows_to=[_OUT, _ROOT_OUT])
    rows.birth("ExpBackward0", "act", flows_to=[_OUT, _ROOT_OUT])
    assert _op(_finding(Cause.MODULE, out, maker="act"), rows) == "DivBackward0"


@pytest.mark.parametrize("place", [Boundary("act", 1, "0"), Boundary("act", 0, "1"), Boundary("fc1", 0, "0")])
def test_another_call_path_or_module_is_another_place(place: Boundary) -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NAN)
    rows.birth("LogBackward0", "fc1", flows_to=[place])
    rows.birth("DivBackward0", "fc1", flows_to=[_OUT])
    assert _op(_finding(Cause.MODULE, out, maker="act"), rows) == "DivBackward0"


def test_a_mask_that_flows_along_is_not_the_maker() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NAN)
    rows.birth("MaskedFillBackward0", "act", made=NEGINF, fill=True, flows_to=[_OUT])
    rows.birth("SoftmaxBackward0", "act", flows_to=[_OUT])
    assert _op(_finding(Cause.MODULE, out, maker="act"), rows) == "SoftmaxBackward0"


@pytest.mark.parametrize(("log", "maker"), [("aten.log", "SoftmaxBackward0"), ("LogBackward0", "LogBackward0")])
def test_logs_of_zeros_and_ones_are_a_mask_where_no_gradient_flows_through_them(log: str, maker: str) -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NAN)
    mask = NEGINF | {"min": 0.0, "max": 0.0, "norm": 0.0}
    rows.birth(log, "act", made=mask, flows_to=[_OUT])
    rows.birth("SoftmaxBackward0", "act", flows_to=[_OUT])
    assert _op(_finding(Cause.MODULE, out, maker="act"), rows) == maker


def test_where_only_a_mask_flowed_there_the_mask_is_the_answer() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NEGINF)
    rows.birth("aten.lift_fresh", "act", made=NEGINF, fill=True, flows_to=[_OUT])  # torch.tensor(-inf)
    rows.birth("MaskedFillBackward0", "act", made=NEGINF, fill=True, flows_to=[_OUT])
    rows.birth("BinaryCrossEntropyWithLogitsBackward0", "criterion", flows_to=[Boundary("criterion", 0, "0")])
    explanation = explain(_finding(Cause.MODULE, out, maker="act"), _of_replay(rows.records), 0)
    assert explanation.birth is not None and explanation.birth.detail.fill
    assert explanation.to_dict()["op"] == "MaskedFillBackward0"
    assert explanation.to_dict()["op_kind"] == "-Infinity"


def test_where_only_constants_without_a_gradient_flowed_there_the_first_is_the_answer() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NEGINF)
    rows.birth("aten.full", "act", made=NEGINF, fill=True, flows_to=[_OUT])
    rows.birth("aten.copy_", "act", made=NEGINF, fill=True, flows_to=[_OUT])
    assert _op(_finding(Cause.MODULE, out, maker="act"), rows) == "aten.full"


def test_a_value_made_between_two_calls_is_found_where_it_left_the_enclosing_module() -> None:
    rows = Rows()
    seen = rows.add("forward", "act", "input", **INF)
    out = rows.add("forward", "", "output", **NAN)
    rows.birth("LogBackward0", "fc1", flows_to=[Boundary("fc1", 0, "0")])
    rows.birth("ExpBackward0", "", made=INF, flows_to=[_ROOT_OUT])
    assert _op(_finding(Cause.BETWEEN, out, seen, maker=""), rows) == "ExpBackward0"


def test_a_value_made_between_two_calls_is_found_by_the_call_that_took_it() -> None:
    rows = Rows()
    seen = rows.add("forward", "act", "input", **INF)
    rows.birth("LogBackward0", "fc1", flows_to=[Boundary("fc1", 0, "0")])
    rows.birth("ExpBackward0", "", made=INF, flows_to=[_OUT])
    assert _op(_finding(Cause.BETWEEN, seen, maker=""), rows) == "ExpBackward0"


def test_without_a_flow_the_first_operation_of_the_maker_that_is_no_fill_is_taken() -> None:
    rows = Rows()
    buffer = rows.add("optimizer", "act", "buffer", "running_var", **NAN)
    rows.birth("LogBackward0", "fc1")
    rows.birth("aten.fill_", "act", made=INF, fill=True)
    rows.birth("VarBackward0", "act")
    assert _op(_finding(Cause.BUFFER, buffer, maker="act"), rows) == "VarBackward0"


def test_no_operation_of_the_maker_is_no_answer() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **NAN)
    rows.birth("LogBackward0", "fc1", flows_to=[Boundary("fc1", 0, "0")])
    rows.birth("SqrtBackward0", "act", "grad_input")
    assert _op(_finding(Cause.MODULE, out, maker="act"), rows) is None


def test_loss_code_is_explained_by_operations_outside_of_any_module() -> None:
    rows = Rows()
    loss = rows.scalar("loss", "loss", None, **NAN)
    rows.birth("ExpBackward0", "act", flows_to=[_OUT])
    rows.birth("DivBackward0", None, "grad_input")
    rows.birth("WhereBackward0", None, made=NEGINF, fill=True)
    rows.birth("LogBackward0", None, made=NEGINF)
    assert _op(_finding(Cause.LOSS, loss), rows) == "LogBackward0"


def test_code_between_two_models_is_explained_like_loss_code() -> None:
    rows = Rows()
    seen = rows.add("forward", "critic", "input", **NAN)
    rows.birth("ExpBackward0", "act")
    rows.birth("DivBackward0", None)
    assert _op(_finding(Cause.BETWEEN, seen), rows) == "DivBackward0"


def test_of_a_loss_whose_only_operation_is_a_fill_the_fill_is_the_answer() -> None:
    rows = Rows()
    loss = rows.scalar("loss", "loss", None, **INF)
    rows.birth("WhereBackward0", None, made=INF, fill=True)
    assert _op(_finding(Cause.LOSS, loss), rows) == "WhereBackward0"


def test_a_backward_value_was_made_by_the_first_operation_within_the_maker() -> None:
    rows = Rows()
    row = rows.add("backward", "block", "grad_input", **NAN)
    rows.birth("ExpBackward0", "block", flows_to=[Boundary("block", 0, "0")])
    rows.birth("LogBackward0", "blocks", "grad_input")
    rows.birth("SqrtBackward0", "block.norm", "grad_input", made=INF)
    rows.birth("DivBackward0", "block", "grad_input")
    assert _op(_finding(Cause.BACKWARD, row, maker="block"), rows) == "SqrtBackward0"


def test_in_backward_another_call_of_the_maker_is_blamed_last() -> None:
    rows = Rows()
    row = rows.add("backward", "cell", "grad_input", call=1, **INF)
    rows.birth("MulBackward0", "cell", "grad_input", call=2)  # died before it left that call
    rows.birth("MmBackward0", "cell", "grad_input", made=INF, call=1)
    assert _op(_finding(Cause.BACKWARD, row, maker="cell"), rows) == "MmBackward0"
    alone = Rows()
    alone.birth("MulBackward0", "cell", "grad_input", call=2)
    assert _op(_finding(Cause.BACKWARD, row, maker="cell"), alone) == "MulBackward0"


def test_backward_code_between_calls_is_the_makers_own() -> None:
    rows = Rows()
    row = rows.add("backward", "pool", "grad_input", **NAN)
    rows.birth("SqrtBackward0", "pool.score", "grad_input")
    rows.birth("DivBackward0", "pool", "grad_input")
    assert _op(_finding(Cause.BACKWARD_BETWEEN, row, maker="pool"), rows) == "DivBackward0"


def test_backward_code_in_a_module_that_was_left_out_is_within_the_maker() -> None:
    rows = Rows()
    row = rows.add("backward", "pool", "grad_input", **NAN)
    rows.birth("SqrtBackward0", "pool.score", "grad_input")
    assert _op(_finding(Cause.BACKWARD_BETWEEN, row, maker="pool"), rows) == "SqrtBackward0"


def test_backward_code_of_the_loss_lies_outside_of_any_module() -> None:
    rows = Rows()
    row = rows.add("backward", "", "grad_output", **NAN)
    rows.birth("SqrtBackward0", "act", "grad_input")
    rows.birth("LogBackward0", None, made=INF)
    rows.birth("DivBackward0", None, "grad_input")
    assert _op(_finding(Cause.BACKWARD_BETWEEN, row), rows) == "DivBackward0"


def test_a_parameters_gradient_was_made_within_its_module() -> None:
    rows = Rows()
    row = rows.add("backward", "fc2", "grad", "weight", **INF)
    rows.birth("DivBackward0", None, "grad_input")
    rows.birth("AddmmBackward0", "fc2", "grad_input", made=INF)
    assert _op(_finding(Cause.GRADIENT, row, maker="fc2"), rows) == "AddmmBackward0"


def test_a_parameters_gradient_may_be_made_by_code_further_out_or_by_a_penalty_in_the_loss() -> None:
    rows = Rows()
    row = rows.add("backward", "block.emb", "grad", "weight", **INF)
    rows.birth("SqrtBackward0", "other", "grad_input")
    rows.birth("MmBackward0", "block", "grad_input", made=INF)
    assert _op(_finding(Cause.GRADIENT, row, maker="block.emb"), rows) == "MmBackward0"
    penalty = Rows()
    penalty.birth("SqrtBackward0", "other", "grad_input")
    penalty.birth("LinalgVectorNormBackward0", None, "grad_input")
    assert _op(_finding(Cause.GRADIENT, row, maker="block.emb"), penalty) == "LinalgVectorNormBackward0"


def test_a_parameters_gradient_may_be_made_by_a_module_that_shares_it_or_was_not_recorded() -> None:
    rows = Rows()
    row = rows.add("backward", "emb", "grad", "weight", **INF)
    rows.birth("MmBackward0", "head", "grad_input", made=INF)
    rows.birth("MulBackward0", "norm", "grad_input", made=INF)
    assert _op(_finding(Cause.GRADIENT, row, maker="emb"), rows) == "MmBackward0"


def test_the_findings_own_pass_comes_before_the_steps_other_passes() -> None:
    rows = Rows()
    rows.birth("LogBackward0", "act", flows_to=[_OUT])
    rows.replay("not_reproduced", "other numbers")
    rows.micro_step = 1
    out = rows.add("forward", "act", "output", **NAN)
    rows.birth("DivBackward0", "act", flows_to=[_OUT])
    rows.replay()
    explanation = explain(_finding(Cause.MODULE, out, maker="act"), _of_replay(rows.records), 0)
    assert explanation.birth is not None and explanation.birth.op == "DivBackward0"
    assert explanation.confirmation.status == "reproduced"


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (Cause.BATCH, "the batch arrived with it"),
        (Cause.INITIAL, "the run started with it"),
        (Cause.MOVED_IN, "something other than the optimizer wrote it into the weights"),
        (Cause.CHANGED_GRADIENT, "the gradient was changed between backward and the optimizer step"),
        (Cause.UPDATE, "the optimizer's update made it"),
        (Cause.LEARNING_RATE, "the learning rate was not finite"),
        (Cause.LOSS_SCALE, "GradScaler lowered its scale again and again"),
    ],
)
def test_what_no_operation_of_forward_or_backward_made_is_not_replayed(cause: Cause, why: str) -> None:
    rows = Rows()
    row = rows.add("optimizer", "act", "param", "weight", **NAN)
    rows.birth("DivBackward0", "act", flows_to=[_OUT])
    rows.replay(anomaly_op="DivBackward0")
    answer = explain(_finding(cause, row, maker="act"), _of_replay(rows.records), 0).to_dict()
    assert (answer["op"], answer["location"], answer["traceback"]) == (None, None, [])
    assert answer["confirmation"] == {
        "status": "not_replayed",
        "reason": f"the value was not made by an operation of the forward or backward: {why}",
        "anomaly_op": None,
        "anomaly_agrees": None,
        "anomaly_message": None,
    }


def test_the_reason_of_a_later_steps_replay_follows_that_it_was_one() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **INF)
    rows.step = 9
    rows.replay("not_replayed", "out of memory")
    explanation = explain(_finding(Cause.MODULE, out, maker="act"), _of_replay(rows.records), 0)
    assert explanation.confirmation.reason == "it was step 9 of the same incident that was replayed; out of memory"


def test_a_step_before_the_one_in_which_the_incident_showed_cannot_have_been_replayed() -> None:
    rows = Rows()
    rows.step = 3
    out = rows.add("forward", "act", "output", **INF)
    explanation = explain(_finding(Cause.MODULE, out, maker="act"), [], 5)
    assert explanation.confirmation.reason == (
        "made in step 3, but noticed only in step 5, and only the latter can be replayed"
    )
    assert not explanation.recorded


def test_a_recording_without_a_replay_says_so() -> None:
    rows = Rows()
    out = rows.add("forward", "act", "output", **INF)
    explanation = explain(_finding(Cause.MODULE, out, maker="act"), [], 0)
    assert explanation.confirmation.status == "not_replayed"
    assert explanation.confirmation.reason == "the recording holds no replay of this step"


def test_operations_whose_replay_left_no_word_still_count() -> None:
    rows = Rows()
    loss = rows.scalar("loss", "loss", None, **NAN)
    rows.birth("LogBackward0", None)
    explanation = explain(_finding(Cause.LOSS, loss), _of_replay(rows.records), 0)
    assert explanation.birth is not None and explanation.birth.op == "LogBackward0"
    assert explanation.confirmation.status == "not_replayed"
    assert explanation.confirmation.reason == "the recording does not say how the replay went"


def test_an_operation_of_the_loss_counts_though_nothing_could_be_replayed() -> None:
    rows = Rows()
    loss = rows.scalar("loss", "loss", None, **NAN)
    rows.birth("LogBackward0", None)
    rows.replay("not_replayed", "loss code lies outside of any module", term="term 2 of 3")
    answer = explain(_finding(Cause.LOSS, loss), _of_replay(rows.records), 0).to_dict()
    assert (answer["op"], answer["term"]) == ("LogBackward0", "term 2 of 3")
    assert answer["confirmation"]["status"] == "not_replayed"
    assert answer["confirmation"]["reason"] == "loss code lies outside of any module"


@pytest.mark.parametrize(("anomaly_op", "agrees"), [(None, None), ("SqrtBackward0", True), ("PowBackward0", False)])
def test_json_says_whether_anomaly_detection_agrees(anomaly_op: str | None, agrees: bool | None) -> None:
    rows = Rows()
    row = rows.add("backward", "act", "grad_input", **NAN)
    frames = [SourceLine("train.py", 40, "step", "loss.backward()"), SourceLine("net.py", 7, "forward", "x.sqrt()")]
    rows.birth("SqrtBackward0", "act", "grad_input", INF, traceback=frames)
    message = anomaly_op and f"Function '{anomaly_op}' returned nan values in its 0th output."
    rows.replay(anomaly_op=anomaly_op, anomaly_output=0 if anomaly_op else None, anomaly_message=message)
    answer = explain(_finding(Cause.BACKWARD, row, maker="act"), _of_replay(rows.records), 0).to_dict()
    assert answer == {
        "op": "SqrtBackward0",
        "op_kind": "Infinity",
        "location": {"file": "net.py", "line": 7, "function": "forward", "code": "x.sqrt()"},
        "traceback": [
            {"file": "train.py", "line": 40, "function": "step", "code": "loss.backward()"},
            {"file": "net.py", "line": 7, "function": "forward", "code": "x.sqrt()"},
        ],
        "term": None,
        "confirmation": {
            "status": "reproduced",
            "reason": None,
            "anomaly_op": anomaly_op,
            "anomaly_agrees": agrees,
            "anomaly_message": message,
        },
    }


def test_where_no_operation_was_found_anomaly_detection_has_nothing_to_agree_with() -> None:
    rows = Rows()
    row = rows.add("backward", "act", "grad_input", **NAN)
    rows.replay(anomaly_op="PowBackward0")
    explanation = explain(_finding(Cause.BACKWARD, row, maker="act"), _of_replay(rows.records), 0)
    assert explanation.birth is None
    assert explanation.anomaly_agrees is None
    assert explanation.to_dict()["confirmation"]["anomaly_op"] == "PowBackward0"


def test_a_result_that_could_not_be_measured_has_no_kind_and_a_line_without_a_frame_no_function() -> None:
    rows = Rows()
    loss = rows.scalar("loss", "loss", None, **NAN)
    unknown = dict.fromkeys(("nan_count", "posinf_count", "neginf_count", "min", "max", "norm"))
    rows.birth("LogBackward0", None, made=unknown, file="loss.py", line=3)
    answer = explain(_finding(Cause.LOSS, loss), _of_replay(rows.records), 0).to_dict()
    assert answer["op_kind"] is None
    assert answer["location"] == {"file": "loss.py", "line": 3, "function": None, "code": None}
    assert answer["traceback"] == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("DivBackward0", "div"),
        ("aten.div", "div"),
        ("aten.div_", "div"),
        ("LinalgVectorNormBackward0", "linalgvectornorm"),
        ("aten.linalg_vector_norm", "linalgvectornorm"),
        ("torch::autograd::CopySlices", "copyslices"),
        ("SurvivalProductBackward", "survivalproductbackward"),
    ],
)
def test_an_operation_has_one_name_as_node_and_in_aten(name: str, short: str) -> None:
    assert op_name(name) == short


# From the file ------------------------------------------------------------------------------------------------


def _failing_step(values: dict[str, Any]) -> Rows:
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, 1)
    forward(rows, act=values, fc2_in=ALL_NAN, fc2=ALL_NAN, out=ALL_NAN)
    rows.scalar("loss", "loss", None, **NAN)
    return rows


def test_the_verdict_of_a_file_has_the_operation_and_its_hint(tmp_path: Path) -> None:
    rows = _failing_step(NAN)
    rows.birth("LogBackward0", "act", flows_to=[_OUT], operands=[("input", "self", {"min": -2.0, "max": 1.0})])
    rows.replay()
    update(rows, fc1=ALL_NAN, fc2=ALL_NAN)
    with open_rows(tmp_path, rows) as run:
        verdict = first_nan(run)
    assert (verdict.to_dict()["op"], verdict.to_dict()["op_kind"]) == ("LogBackward0", "NaN")
    assert verdict.to_dict()["confirmation"]["status"] == "reproduced"
    assert verdict.hints[0].startswith("log of 0 is -inf and of a negative number nan")


def test_a_replay_of_another_rank_or_step_explains_nothing(tmp_path: Path) -> None:
    rows = Rows()
    healthy(rows, 1)
    rows.step = 0
    rows.birth("LogBackward0", "act", flows_to=[_OUT])  # of a step that healed
    rows.step = 1
    forward(rows, act=NAN, fc2_in=ALL_NAN, fc2=ALL_NAN, out=ALL_NAN)
    rows.scalar("loss", "loss", None, **NAN)
    rows.birth("DivBackward0", "act", flows_to=[_OUT])
    rows.records[-1] = rows.records[-1]._replace(rank=1)
    for rank in range(2):
        of_rank = [row for row in rows.records if row.rank == rank]
        path = write_run(tmp_path / "run.parquet", of_rank, modules=MODULES, rank=rank, world_size=2)
    with open_run(path) as run:
        answer = first_nan(run).to_dict()
    assert (answer["step"], answer["module"]) == (1, "act")
    assert answer["op"] is None


def test_of_ten_skipped_steps_the_last_is_replayed_and_explains_the_first(tmp_path: Path) -> None:
    rows = Rows()
    healthy(rows, 1)
    for number in range(11):
        forward(rows)
        backward(rows, act_in=INF, fc1=INF, fc1_grad=INF)
        if number in (9, 10):
            rows.birth("MulBackward0" if number == 9 else "DivBackward0", "act", "grad_input", INF)
            rows.replay()
        rows.skip()
        rows.step += 1
    with open_rows(tmp_path, rows) as run:
        answer = first_nan(run).to_dict()
    assert (answer["step"], answer["module"], answer["tensor"]) == (1, "act", "grad_input")
    assert answer["op"] == "MulBackward0"
    assert answer["confirmation"]["status"] == "reproduced"
    assert answer["confirmation"]["reason"] == "it was step 10 of the same incident that was replayed"


def test_a_later_step_explains_nothing_where_the_first_of_them_mattered(tmp_path: Path) -> None:
    rows = Rows()
    healthy(rows, 1)
    for _ in range(2):
        forward(rows)
        backward(rows, act_in=INF, fc1=INF, fc1_grad=INF)
        update(rows)
        rows.step += 1
    rows.step -= 1
    rows.birth("MulBackward0", "act", "grad_input", INF)
    rows.replay()
    with open_rows(tmp_path, rows) as run:
        answer = first_nan(run).to_dict()
    assert (answer["step"], answer["op"]) == (1, None)
    assert answer["confirmation"]["reason"] == "the recording holds no replay of this step"


def test_without_an_operation_the_place_is_where_the_loss_code_met_the_value(tmp_path: Path) -> None:
    rows = Rows()
    forward(rows)
    rows.scalar("loss", "loss", None, nan_count=1)
    place = (SourceLine("train.py", 3, "<module>", "main()"), SourceLine("train.py", 9, "loss", "total = a * weights"))
    rows.replay("reproduced", "operand other of MulBackward0 was non-finite already", place=place)
    with open_rows(tmp_path, rows) as run:
        found = first_nan(run).to_dict()
    assert (found["phase"], found["op"]) == ("loss", None)
    assert found["location"] == {"file": "train.py", "line": 9, "function": "loss", "code": "total = a * weights"}
    assert [frame["line"] for frame in found["traceback"]] == [3, 9]
