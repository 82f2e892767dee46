"""The zoo's scoring, against verdicts made by hand, and the form of its cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.zoo import table
from benchmarks.zoo.cases import GROUPS, HOME, Case, load
from benchmarks.zoo.peers import compare
from benchmarks.zoo.score import FIELDS, score

CASES = load()
IDS = [case.id for case in CASES]

KEYS = {
    *("id", "source", "kind", "false_alarm", "step", "phase", "module", "tensor", "op", "first_value", "note"),
    *("accept", "anomaly_mode", "loss_nonfinite_step", "weights_poisoned_step"),
}
PHASES = {"input", "parameter", "forward", "loss", "backward", "optimizer", "none"}
TENSORS = {"input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "loss", "lr", None}


def _case(lines: tuple[int, ...] = (), **truth: Any) -> Case:
    """Return a case of a failure in the forward pass of `head`, or as ``truth`` has it."""
    known = {"false_alarm": False, "step": 3, "phase": "forward", "module": "head", "tensor": "output"}
    known |= {"op": "ExpBackward0", "accept": []} | truth
    return Case("900_made_up", "own", Path("900_made_up.py"), known, lines)


def _answer(**changed: Any) -> dict[str, Any]:
    """Return the verdict that is right for ``_case()``, but for what is ``changed``."""
    right: dict[str, Any] = {"found": True, "step": 3, "micro_step": 0, "phase": "forward", "module": "head"}
    location = {"file": "/somewhere/900_made_up.py", "line": 12}
    return right | {"tensor": "output", "op": "ExpBackward0", "location": location} | changed


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_case_has_its_keys_and_a_script_that_compiles(case: Case) -> None:
    assert case.truth.keys() >= KEYS
    assert case.truth["id"] == case.id
    assert case.truth["phase"] in PHASES
    assert case.truth["tensor"] in TENSORS
    assert case.healthy == (case.truth["step"] is None) == (case.truth["phase"] == "none")
    source = case.script.read_text()
    compile(source, case.script.name, "exec")
    assert "gradtrace" not in source


def test_the_given_cases_are_whole_and_enough_are_our_own() -> None:
    failing = {group: [case for case in CASES if case.group == group and not case.healthy] for group in GROUPS}
    healthy = {group: [case for case in CASES if case.group == group and case.healthy] for group in GROUPS}
    assert (len(failing["given"]), len(healthy["given"])) == (35, 12)
    assert len(failing["own"]) + len(healthy["own"]) >= 15
    assert len(healthy["own"]) >= 4


def test_no_two_cases_share_a_number() -> None:
    numbers = [case.id.split("_")[0] for case in CASES]
    assert len(numbers) == len(set(numbers))


def test_every_json_belongs_to_a_script() -> None:
    alone = {path.stem for group in GROUPS for path in (HOME / group).glob("*.json")} - set(IDS)
    assert alone == {"lines"}


def test_the_line_of_a_case_is_found_by_its_text() -> None:
    (case,) = load(["01"])
    (line,) = case.lines
    assert case.script.read_text().splitlines()[line - 1].strip() == "return (a - b).pow(2).sum(dim=-1).sqrt()"


def test_a_case_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match="no case starts with 'nothing'"):
        load(["nothing"])


def test_a_right_verdict_has_every_mark() -> None:
    assert score(_case(lines=(12,)), _answer()) == dict.fromkeys(FIELDS, True)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("step", {"step": 4}),
        ("phase", {"phase": "loss"}),
        ("module", {"module": "body"}),
        ("module", {"module": ""}),
        ("module", {"module": None}),
        ("tensor", {"tensor": "input"}),
        ("op", {"op": "LogBackward0"}),
        ("op", {"op": None}),
        ("line", {"location": {"file": "/somewhere/900_made_up.py", "line": 13}}),
        ("line", {"location": {"file": "/somewhere/else.py", "line": 12}}),
        ("line", {"location": None}),
    ],
)
def test_each_field_is_marked_on_its_own(field: str, wrong: dict[str, Any]) -> None:
    assert score(_case(lines=(12,)), _answer(**wrong)) == dict.fromkeys(FIELDS, True) | {field: False}


def test_an_op_or_a_line_that_the_case_does_not_have_is_not_scored() -> None:
    marks = score(_case(op=None), _answer(op="ExpBackward0"))
    assert marks == dict.fromkeys(FIELDS, True) | {"op": None, "line": None}


@pytest.mark.parametrize("answer", [None, {"found": False}])
def test_a_failure_that_is_not_found_has_every_field_wrong(answer: dict[str, Any] | None) -> None:
    assert score(_case(), answer) == dict.fromkeys(FIELDS, False) | {"line": None}


@pytest.mark.parametrize(("answer", "quiet"), [({"found": False}, True), ({"found": True}, False), (None, False)])
def test_a_healthy_run_is_only_asked_whether_it_was_left_in_peace(answer: Any, quiet: bool) -> None:
    assert score(_case(false_alarm=True), answer) == {"quiet": quiet}


def test_an_accepted_reading_is_as_good_as_the_main_one() -> None:
    case = _case(accept=[{"phase": "loss", "module": None, "tensor": "loss", "nonfinite": "nan"}])
    assert score(case, _answer(phase="loss", module=None, tensor="loss")) == score(case, _answer())


def test_readings_are_not_mixed() -> None:
    case = _case(accept=[{"phase": "loss", "module": None, "tensor": "loss"}])
    marks = score(case, _answer(phase="loss", module="head", tensor="loss"))
    assert (marks["phase"], marks["module"], marks["tensor"]) == (True, False, True)


def test_the_first_consumer_is_as_good_an_op() -> None:
    case = _case(first_consumer="MulBackward0")
    assert score(case, _answer(op="MulBackward0"))["op"] is True
    assert score(case, _answer(op="AddBackward0"))["op"] is False


@pytest.mark.parametrize(
    ("module", "right"), [("head", True), ("policy.head", True), ("policy", False), ("critic.head", False)]
)
def test_a_module_may_go_by_the_name_of_its_model(module: str, right: bool) -> None:
    assert score(_case(model="policy"), _answer(module=module))["module"] is right


@pytest.mark.parametrize(("module", "right"), [("", True), ("policy", True), ("policy.head", False), (None, False)])
def test_the_root_may_go_by_the_name_of_its_model(module: str | None, right: bool) -> None:
    assert score(_case(module="", model="policy"), _answer(module=module))["module"] is right


def test_a_model_that_only_an_accepted_reading_names_counts_too() -> None:
    case = _case(module=None, accept=[{"module": "", "model": "criterion"}])
    assert score(case, _answer(module="criterion"))["module"] is True


@pytest.mark.parametrize("module", ["module.head", "head"])
def test_a_wrapper_may_be_named_or_not(module: str) -> None:
    assert score(_case(module="module.head"), _answer(module=module))["module"] is True


def test_optimizer_step_and_micro_step_replace_the_loops_step() -> None:
    case = _case(step=7, optimizer_step=3, micro_step=1)
    assert score(case, _answer(step=3, micro_step=1))["step"] is True
    assert score(case, _answer(step=3, micro_step=0))["step"] is False
    assert score(case, _answer(step=7))["step"] is False
    assert score(case, _answer(step=0, iteration=7))["step"] is True  # a peer knows the loop's counter alone


def test_a_list_of_ops_is_right_where_it_holds_the_op() -> None:
    assert score(_case(op="MmBackward0"), _answer(op=["AddmmBackward0", "MmBackward0"]))["op"] is True
    assert score(_case(op="MmBackward0"), _answer(op=["AddmmBackward0"]))["op"] is False


def test_totals_keep_the_groups_apart_and_count_what_is_scored() -> None:
    right, wrong = score(_case(), _answer()), score(_case(op=None), _answer(step=4))
    results = [
        {"group": "given", "marks": right},
        {"group": "given", "marks": wrong},
        {"group": "own", "marks": {"quiet": False}},
    ]
    head, given, own = table.totals(results, FIELDS).splitlines()
    assert head.split() == [*FIELDS, "step", "and", "phase", "quiet", "when", "healthy"]
    counted = ["1 of 2", "2 of 2", "2 of 2", "2 of 2", "1 of 1", "0 of 0", "1 of 2", "0 of 0"]
    assert given.split() == ["given", *" ".join(counted).split()]
    assert own.split() == ["own", *" ".join(["0 of 0"] * 7 + ["0 of 1"]).split()]


def test_a_wrong_verdict_is_shown_with_what_was_said() -> None:
    results = [{"id": "900_made_up", "marks": score(_case(), _answer(step=4)), "said": "step 4, forward"}]
    head, row = table.by_case(results, FIELDS).splitlines()
    assert head.split() == ["case", *FIELDS, "said"]
    assert row.split() == ["900_made_up", "WRONG", "ok", "ok", "ok", "ok", "-", "step", "4,", "forward"]


def test_a_peer_that_does_not_name_roots_has_the_reading_that_fits() -> None:
    case = _case(module="")
    said = _answer(module=None, phase="loss", iteration=3)
    other = said | {"or": {"phase": "forward", "module": ""}}
    marks = {
        name: compare.judged({"probe": {case.id: answer}}, [case])["probe"][0]["marks"]
        for name, answer in (("plain", said), ("either", other))
    }
    assert (marks["plain"]["phase"], marks["plain"]["module"]) == (False, False)
    assert (marks["either"]["phase"], marks["either"]["module"]) == (True, True)
    outside = _case(module=None, phase="loss")
    assert compare.judged({"probe": {case.id: other}}, [outside])["probe"][0]["marks"]["module"] is True


def test_a_peer_is_scored_for_what_it_reports_and_a_crash_is_neither_right_nor_quiet() -> None:
    answers = [
        {"id": "1", "group": "own", "found": True, "marks": {"step": True, "module": False}},
        {"id": "2", "group": "own", "found": False, "marks": {"step": False, "module": False}},
        {"id": "3", "group": "own", "found": False, "note": "crashed: KeyError", "marks": {"quiet": True}},
        {"id": "4", "group": "own", "found": False, "marks": {"quiet": True}},
    ]
    empty: list[dict[str, Any]] = []
    result = {"date": "2026-01-01", "machine": "m", "versions": {"torch": "2"}, "underflow": answers}
    page = compare.report(result | {peer: empty for peer in compare.REPORTS if peer != "underflow"})
    row = next(line for line in page.splitlines() if "DebugUnderflowOverflow | own" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == ["1 of 2", "", "0 of 2", "", "", "", "1 of 2", "1", "1"]
    assert "crashed in 3; silent in 2." in page
