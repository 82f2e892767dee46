"""What ``gradtrace first-nan`` prints of a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gradtrace_cli.main import main

from gradtrace.analysis.births import Explanation, read_births
from gradtrace.analysis.replay_text import operation, replay
from gradtrace.trace.confirmation import Boundary, Confirmation, SourceLine, Status
from tests.analysis.rows import INF, MODULES, NAN, NEGINF, PARAMS, Rows, backward, forward, healthy, update
from tests.traces import write_run

GOLDEN = Path(__file__).parent / "golden"
TRAIN = SourceLine("/home/me/train.py", 88, "step", "loss = model(batch)")
NET = SourceLine("/home/me/net.py", 19, "forward", "return (a - b).pow(2).sum(dim=-1).sqrt()")
LIBRARY = SourceLine("/venv/lib/python3.12/site-packages/nets/pool.py", 7, "pool", "return x / n")


def _operation(op: str = "SqrtBackward0", made: dict[str, Any] = INF, **values: Any) -> dict[str, str]:
    rows = Rows()
    rows.birth(op, "act", "grad_input", made, **values)
    return dict(operation(read_births(rows.records)[0]))


def _replay(
    op: str | None, tensor: str = "grad_input", made: dict[str, Any] = INF, *, recorded: bool = True, **said: Any
) -> dict[str, str]:
    rows = Rows()
    if op:
        rows.birth(op, "act", tensor, made)
    births = read_births(rows.records)
    confirmation = Confirmation(**({"status": "reproduced"} | said))
    return dict(replay(Explanation(confirmation, births[0] if births else None, recorded)))


def test_the_operation_comes_with_its_value_and_line() -> None:
    assert _operation(traceback=[TRAIN, NET]) == {
        "made by": "SqrtBackward0 (inf), /home/me/net.py:19 in forward: return (a - b).pow(2).sum(dim=-1).sqrt()"
    }


def test_a_file_below_the_working_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = SourceLine(str(tmp_path / "src" / "net.py"), 3, "<module>", "")
    assert _operation(traceback=[line])["made by"] == f"SqrtBackward0 (inf), {Path('src/net.py')}:3 in <module>"


def test_a_line_in_a_library_is_followed_by_the_users_own() -> None:
    said = _operation("DivBackward0", NAN, traceback=[TRAIN, LIBRARY])
    assert said["made by"] == f"DivBackward0 (nan), {LIBRARY.file}:7 in pool: return x / n"
    assert said["called at"] == "/home/me/train.py:88 in step: loss = model(batch)"


@pytest.mark.parametrize(
    "file",
    ["/usr/lib/python3/dist-packages/nets.py", "/usr/lib/python3.12/runpy.py", r"C:\venv\Lib\site-packages\nets.py"],
)
def test_installed_packages_and_the_standard_library_are_not_the_users(file: str) -> None:
    assert _operation(traceback=[TRAIN, SourceLine(file, 1, "f")])["called at"].startswith("/home/me/train.py:88")
    assert "called at" not in _operation(traceback=[SourceLine(file, 1, "f")])


def test_an_operation_without_a_line_or_a_measured_value_says_so() -> None:
    unknown = dict.fromkeys(("nan_count", "posinf_count", "neginf_count", "min", "max", "norm"))
    assert _operation(made=unknown) == {"made by": "SqrtBackward0 (value not measured), on a line that is not known"}
    assert _operation(file="net.py", line=3) == {"made by": "SqrtBackward0 (inf), net.py:3"}


def test_a_fill_is_said_to_be_one() -> None:
    operands = [("input", "value", {"min": None, "max": None, "neginf_count": 1}), ("input", "self", {})]
    said = _operation("MaskedFillBackward0", NEGINF, fill=True, traceback=[NET], operands=operands)
    assert list(said) == ["made by"]  # what the constant was is said already
    assert said["made by"].startswith(
        "MaskedFillBackward0 (-inf, a constant that the code gave it), /home/me/net.py:19"
    )


def test_operands_are_shown_with_their_ranges_and_what_these_explain() -> None:
    operands = [
        ("grad_output", "0", {"min": 0.125, "max": 0.125}),
        ("input", "saved.other", {"min": 0.0, "max": 12.3456}),
        ("input", "saved.self", {"min": None, "max": None}),
    ]
    assert _operation("DivBackward0", operands=operands)["operands"] == (
        "saved other: 0 to 12.35 (holds 0); grad_output 0: 0.125; saved self: nothing finite"
    )


@pytest.mark.parametrize(
    ("op", "tensor", "made", "anomaly_op", "text"),
    [
        ("SqrtBackward0", "grad_input", NAN, "SqrtBackward0", "reproduced; anomaly detection agrees"),
        (
            "SqrtBackward0",
            "grad_input",
            INF,
            "PowBackward0",
            "reproduced; anomaly detection stops later, at PowBackward0 (nan)",
        ),
        (
            "SqrtBackward0",
            "grad_input",
            NAN,
            "PowBackward0",
            "reproduced; anomaly detection stops at PowBackward0 (nan)",
        ),
        (
            "MmBackward0",
            "grad_input",
            INF,
            None,
            "reproduced; anomaly detection sees nothing: it looks for nan only, in backward only",
        ),
        (
            "ExpBackward0",
            "output",
            INF,
            "MulBackward0",
            "reproduced; anomaly detection, which looks in backward only, stops at MulBackward0 (nan)",
        ),
        (
            "DivBackward0",
            "output",
            NAN,
            "DivBackward0",
            "reproduced; anomaly detection, which looks in backward only, stops at the backward of the same operation "
            "(nan)",
        ),
    ],
)
def test_a_reproduced_step_says_what_anomaly_detection_says(
    op: str, tensor: str, made: dict[str, Any], anomaly_op: str | None, text: str
) -> None:
    assert _replay(op, tensor, made, anomaly_op=anomaly_op) == {"replay": text}


@pytest.mark.parametrize(
    ("status", "reason", "op", "text"),
    [
        (
            "not_reproduced",
            "the outputs differ from the recorded ones",
            "SqrtBackward0",
            "not reproduced: the outputs differ from the recorded ones; the operation was met in the replay, and in "
            "the step it may have been another; anomaly detection sees nothing: it looks for nan only, in backward "
            "only",
        ),
        (
            "not_replayed",
            "loss code lies outside of any module",
            "LogBackward0",
            "not replayed: loss code lies outside of any module; the operation was met in the step itself",
        ),
        (
            "not_replayed",
            "the forward communicates",
            None,
            "not replayed: the forward communicates; which operation made the value is not known",
        ),
        ("reproduced", None, None, "reproduced; which operation made the value is not known"),
    ],
)
def test_what_the_replay_could_not_tell_is_said(status: Status, reason: str | None, op: str | None, text: str) -> None:
    assert _replay(op, status=status, reason=reason) == {"replay": text}


def test_anomaly_detection_is_quoted_where_the_replay_found_no_operation() -> None:
    assert _replay(None, anomaly_op="PowBackward0")["replay"] == (
        "reproduced; which operation made the value is not known; anomaly detection stops at PowBackward0 (nan)"
    )


def test_a_recording_without_a_replay_says_why() -> None:
    reason = "the recording holds no replay of this step"
    said = _replay(None, status="not_replayed", reason=reason, recorded=False)
    assert said == {"replay": "none: the recording holds no replay of this step"}


def test_the_term_of_a_composite_loss_stands_before_the_replay() -> None:
    said = _replay("LogBackward0", "output", NEGINF, status="not_replayed", reason="no", term="term 2 of 3: kl(p, q)")
    assert list(said) == ["term", "replay"]
    assert said["term"] == "2 of 3: kl(p, q)"


def _chain() -> Rows:
    """The slope of sqrt at 0 makes inf, pow turns it to nan, and only that is what anomaly detection can see."""
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, 2)
    forward(rows)
    backward(rows, act_in=NAN, fc1=NAN, fc1_grad=NAN)
    rows.birth(
        "SqrtBackward0",
        "act",
        "grad_input",
        INF,
        operands=[
            ("grad_output", "0", {"min": 0.125, "max": 0.125}),
            ("input", "saved.result", {"min": 0.0, "max": 3.0}),
        ],
        traceback=[TRAIN, NET],
    )
    rows.replay(anomaly_op="PowBackward0", anomaly_output=0, anomaly_message="Function 'PowBackward0' returned nan")
    update(rows, fc1=NAN)
    return rows


def _first_nan(path: Path, rows: Rows, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    run = write_run(path / "run.parquet", rows.records, modules=MODULES)
    assert main(["first-nan", "--context", "1", *options, str(run)]) == 0
    return capsys.readouterr().out


def test_text_names_operation_line_operands_and_replay_in_that_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _first_nan(tmp_path, _chain(), capsys)
    assert text == (GOLDEN / "first_nan_replay.txt").read_text(encoding="utf-8")


def test_json_has_the_operation_beside_the_boundary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(_first_nan(tmp_path, _chain(), capsys, "--json"))
    assert (answer["module"], answer["tensor"], answer["kind"]) == ("act", "grad_input", "NaN")
    assert (answer["op"], answer["op_kind"]) == ("SqrtBackward0", "Infinity")
    assert answer["location"] == NET._asdict()
    assert answer["traceback"] == [TRAIN._asdict(), NET._asdict()]
    assert answer["confirmation"] == {
        "status": "reproduced",
        "reason": None,
        "anomaly_op": "PowBackward0",
        "anomaly_agrees": False,
        "anomaly_message": "Function 'PowBackward0' returned nan",
    }
    assert answer["hints"] == [
        "sqrt has an infinite slope at 0: add an epsilon inside, or clamp_min before it; torch.where after it does "
        "not help, because both branches get a gradient"
    ]


def test_the_class_of_a_module_is_no_source_where_the_line_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows()
    healthy(rows, 1)
    forward(rows, out=NAN)
    rows.scalar("loss", "loss", None, **NAN)
    assert "  source     train.py:9 (class Net)\n" in _first_nan(tmp_path / "a", rows, capsys)
    rows.birth("DivBackward0", "", traceback=[NET], flows_to=[Boundary("", 0, "0")])
    rows.replay()
    assert "source" not in _first_nan(tmp_path / "b", rows, capsys)


def test_a_verdict_that_no_operation_made_has_no_line_on_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows()
    healthy(rows, 1)
    forward(rows, batch=NAN, fc1_in=NAN, fc1=NAN, act_in=NAN, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    rows.scalar("loss", "loss", None, **NAN)
    rows.replay()
    text = _first_nan(tmp_path, rows, capsys)
    assert "  made by    nothing in the model: the batch arrived with it\n" in text
    assert "replay" not in text
