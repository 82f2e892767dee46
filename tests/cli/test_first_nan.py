"""``gradtrace first-nan``: its text, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gradtrace_cli.main import main

from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.writer import RunWriter
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
    update,
)
from tests.traces import write_run

KEYS = [
    "schema_version",
    "found",
    "step",
    "micro_step",
    "rank",
    "seq",
    "phase",
    "module",
    "module_type",
    "call",
    "tensor",
    "path",
    "kind",
    "nan_count",
    "posinf_count",
    "neginf_count",
    "numel",
    "dtype",
    "shape",
    "op",
    "op_kind",
    "location",
    "traceback",
    "term",
    "confirmation",
    "reached",
    "received_by",
    "handled",
    "context",
    "history",
    "affected",
    "contained",
    "candidates",
    "incidents",
    "hints",
    "run",
]
GOLDEN = Path(__file__).parent / "golden"


def _started(steps: int = 2) -> Rows:
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, steps)
    return rows


def _backward_failure() -> Rows:
    rows = _started()
    forward(rows)
    backward(rows, act_in=NAN, fc1=NAN, fc1_grad=NAN)
    update(rows, fc1=NAN)
    rows.step += 1
    forward(rows, fc1=ALL_NAN, act_in=ALL_NAN, act=ALL_NAN, fc2_in=ALL_NAN, fc2=ALL_NAN, out=ALL_NAN)
    rows.scalar("loss", "loss", None, **NAN)
    return rows


def _write(path: Path, rows: Rows, **info: Any) -> str:
    return str(write_run(path / "run.parquet", rows.records, **{"modules": MODULES} | info))


def _golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def _text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["first-nan", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_text_answers_in_the_order_in_which_people_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _text(capsys, "--context", "2", _write(tmp_path, _backward_failure()))
    assert text == _golden("first_nan_backward")


def test_text_of_a_value_that_a_modules_own_code_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _started()
    forward(rows, act_in=INF, act=INF, fc2_in=INF, fc2=NAN, out=NAN)
    backward(rows, None, NAN)
    update(rows)
    rows.step += 1
    healthy(rows, 1)
    text = _text(capsys, "--context", "1", _write(tmp_path, rows))
    assert text == _golden("first_nan_between")


def test_text_of_a_run_with_two_incidents_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _started(1)
    for _ in range(2):
        forward(rows)
        backward(rows, None, NAN)
        update(rows)
        rows.step += 1
        healthy(rows, 1)
    text = _text(capsys, "--context", "0", "--incident", "2", _write(tmp_path, rows))
    assert text == _golden("first_nan_two_incidents")


def test_nothing_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _text(capsys, _write(tmp_path, _started(3))) == (
        "No NaN or Inf that matters in 3 steps of 4 modules (62 records).\n"
    )


def test_nothing_wrong_names_what_was_tolerated_and_what_was_contained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows()
    for step in range(3):
        forward(rows, batch=NAN, fc1_in=INF if step == 1 else {})
        backward(rows)
        update(rows)
        rows.step += 1
    assert _text(capsys, _write(tmp_path, rows)) == (
        "No NaN or Inf that matters in 3 steps of 4 modules (60 records).\n"
        "Tolerated (again and again, or a mask, without harm): (root) input 0 (nan).\n"
        "Contained (once, and gone before it reached loss, gradients or weights): fc1 input 0 (inf).\n"
    )


def _skipping(skips: int, steps: int) -> Rows:
    """A run whose first steps are skipped, with half the loss scale after each."""
    rows = Rows()
    for step in range(steps):
        forward(rows)
        backward(rows, **({"act_in": INF, "fc1": INF, "fc1_grad": INF} if step < skips else {}))
        rows.scalar("optimizer", "loss_scale", 2.0 ** (16 - min(step, skips)), "0")
        rows.skip() if step < skips else update(rows)
        rows.step += 1
    return rows


def test_text_of_skipped_steps_has_the_loss_scale_and_no_word_of_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _text(capsys, "--skipped", _write(tmp_path / "run.parquet", _skipping(5, 8)))
    lines = text.splitlines()
    assert lines[0] == "What GradScaler skipped for: step 0, backward, act (ReLU), grad_input 0: 1 inf of 8"
    assert "  loss scale 65536, 32768, 16384, ..., 4096 at steps 0 to 4" in lines
    assert "reached" not in text


def test_without_a_skipped_step_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _text(capsys, "--skipped", _write(tmp_path / "run.parquet", _skipping(0, 2)))
    assert text == "GradScaler skipped none of 2 steps.\n"


def test_an_empty_run_is_said_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _text(capsys, _write(tmp_path, Rows()))
    assert text == "The run holds no records, so nothing can be said of it.\n"


def test_a_run_that_did_not_complete_is_said_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, _started(3), end="exception RuntimeError")
    assert main(["first-nan", path]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("No NaN or Inf that matters in 3 steps")
    assert captured.err == "gradtrace: note: the run ended with exception RuntimeError; the last recorded step is 2\n"


def test_a_run_that_is_still_being_recorded_is_answered_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.parquet"
    writer = RunWriter(path, RunInfo("test", modules=MODULES))
    records = _backward_failure().records
    for step in range(3):
        writer.write(batch_of_records([record for record in records if record.step == step]))
    try:
        assert main(["first-nan", "--exit-code", str(path)]) == 1
    finally:
        writer.finish(RunInfo("test", modules=MODULES, end="completed"))
    captured = capsys.readouterr()
    assert captured.out.startswith("First non-finite value: step 2, backward, act (ReLU), grad_input 0")
    assert captured.err == ("gradtrace: note: the run is still being recorded; this is what there is up to step 2\n")


def test_json_is_one_object_with_the_fixed_keys_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, _backward_failure())
    answer = json.loads(_text(capsys, "--json", "--context", "1", path))
    assert list(answer) == KEYS
    assert list(answer["confirmation"]) == [
        "status",
        "reason",
        "anomaly_op",
        "anomaly_agrees",
        "anomaly_message",
    ]
    before, history = answer.pop("context"), answer.pop("history")
    assert [(row["module"], row["tensor"], row["fate"]) for row in before] == [("act", "grad_output", None)]
    assert [row["step"] for row in history] == [0, 1]
    hints = answer.pop("hints")
    assert len(hints) == 1 and "0 times an infinite slope" in hints[0]
    assert answer == {
        "schema_version": 1,
        "found": True,
        "step": 2,
        "micro_step": 0,
        "rank": 0,
        "seq": 56,
        "phase": "backward",
        "module": "act",
        "module_type": "ReLU",
        "call": 0,
        "tensor": "grad_input",
        "path": "0",
        "kind": "NaN",
        "nan_count": 1,
        "posinf_count": 0,
        "neginf_count": 0,
        "numel": 8,
        "dtype": "float32",
        "shape": [8],
        "op": None,
        "op_kind": None,
        "location": None,
        "traceback": [],
        "term": None,
        "confirmation": {
            "status": "not_replayed",
            "reason": "the recording holds no replay of this step",
            "anomaly_op": None,
            "anomaly_agrees": None,
            "anomaly_message": None,
        },
        "reached": ["grad", "param", "loss"],
        "received_by": [],
        "handled": False,
        "affected": {"params": 1, "grads": 1, "modules": 0},
        "contained": [],
        "candidates": [],
        "incidents": [
            {
                "incident": 1,
                "first_step": 2,
                "last_step": 3,
                "ended": False,
                "reached": ["grad", "param", "output", "loss"],
                "ranks": [0],
                "chosen": True,
            }
        ],
        "run": {"path": path, "steps": 4, "end": "completed", "missing": []},
    }


def test_json_of_a_run_with_nothing_wrong_has_the_same_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(_text(capsys, "--json", _write(tmp_path, _started())))
    assert list(answer) == KEYS
    assert answer["found"] is False and answer["step"] is None and answer["incidents"] == []


def test_numbers_that_are_not_finite_are_strings_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _started()
    forward(rows)
    rows.add("backward", "fc2", "grad_output", norm=float("inf"))  # finite elements, a norm beyond float64
    rows.add("backward", "fc2", "grad", "weight", **NAN)
    out = _text(capsys, "--json", "--context", "1", _write(tmp_path, rows))
    assert json.loads(out, parse_constant=pytest.fail)["context"][0]["norm"] == "Infinity"


def test_exit_code_is_1_only_when_asked_for_and_something_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = _write(tmp_path / "bad", _backward_failure())
    good = _write(tmp_path / "good", _started())
    assert main(["first-nan", bad]) == 0
    assert main(["first-nan", "--exit-code", bad]) == 1
    assert main(["first-nan", "--exit-code", "--json", bad]) == 1
    assert main(["first-nan", "--exit-code", good]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--incident", "4"], 3, "there is no incident 4: the incidents are 1 to 1"),
        (["--rank", "2"], 3, "has no rank 2; it has: 0"),
        (["--steps", "50:60"], 3, "no recorded step lies in 50:60; the run has 0 to 3"),
        (["--steps", "6-7"], 2, "'6-7' is not A:B, as in 100:200, 100: or :200"),
        (["--steps", "7:7"], 2, "no step lies in 7:7; A:B is A up to, not including, B"),
        (["--incident", "0"], 2, "0 is not in the range x>=1"),
    ],
)
def test_what_the_run_does_not_have_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    path = _write(tmp_path, _backward_failure())
    assert main(["first-nan", *arguments, path]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradtrace: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_source_is_shown_for_classes_of_the_users_and_not_for_torchs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _started()
    forward(rows, fc1=NAN, act_in=NAN, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    torchs = ModuleInfo("fc1", "Linear", file="/lib/python3/site-packages/torch/nn/modules/linear.py", line=1)
    own = ModuleInfo("fc1", "MyLinear", file="layers.py", line=12)
    root = ModuleInfo("", "Net", root=True)
    assert "source " not in _text(capsys, _write(tmp_path / "a", rows, modules=[root, torchs]))
    text = _text(capsys, _write(tmp_path / "b", rows, modules=[root, own]))
    assert "  source     layers.py:12 (class MyLinear)\n" in text
