"""gradtrace check, on the command itself."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner
from gradtrace_cli.check import check
from traces import write_run

from gradtrace.analysis.check.rule_files import all_rules
from gradtrace.errors import RunNotFoundError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

MODULES = [ModuleInfo("", "Net", root=True), *(ModuleInfo(f"layers.{n}", "Linear", depth=2) for n in range(12))]
COUNTS = {"numel": 8, "nan_count": 0, "posinf_count": 0, "neginf_count": 0}


def rows():
    """Six steps: from the third on twelve layers near the limit of float16, in the last the root's gradient jumps."""
    for step in range(6):
        seq = 100 * step
        yield Record(step, seq, "input", "input", "", "tokens", max=7.0, dtype="int64", **COUNTS)
        for number in range(12):
            largest = 50000.0 + 10 * number + step if step >= 2 else 1.0
            values = {"min": 0.0, "max": largest, "norm": largest, "dtype": "float16"}
            yield Record(step, seq + 1 + number, "forward", "output", f"layers.{number}", "0", **values, **COUNTS)
        norm = 30.0 if step == 5 else 1.0
        yield Record(step, seq + 50, "backward", "grad", "", "scale", norm=norm, min=0.0, max=norm, **COUNTS)


@pytest.fixture
def run(tmp_path):
    return str(write_run(tmp_path / "run.parquet", rows(), modules=MODULES))


@pytest.fixture
def quiet(tmp_path):
    return str(write_run(tmp_path / "quiet.parquet", (row for row in rows() if row.step < 2), modules=MODULES))


def invoke(*arguments):
    result = CliRunner().invoke(check, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_line_a_finding_the_earliest_first_and_what_the_rules_mean(run):
    result = invoke(run, "--rows", "2")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["since", "rule", "module", "tensor", "value", "threshold", "note"]
    assert lines[2].split()[:6] == ["2", "near-overflow", "layers.0", "output", "0", "5e+04"]
    assert lines[3].split()[:5] == ["2", "near-overflow", "layers.1", "output", "0"]
    assert lines[4].split()[:6] == ["5", "gradient-spike", "(root)", "grad", "30", "20"]
    assert lines[5] == "and 10 more of near-overflow (--rows -1 shows all)"
    assert "near-overflow (serious): A value is close to the largest that its type holds." in result.stdout
    assert "  Usual mend: Look at the batch of that step; clip the norm of the gradients." in lines
    assert lines[-1].startswith("13 findings: ") and lines[-1].endswith(" rules over 6 steps, 13 modules")
    assert result.stderr.startswith("gradtrace: note: too few steps for some rules: ")
    assert "no-learning-rate needs 10 steps" in result.stderr


def test_all_rows_of_a_rule_are_shown_on_request_and_in_other_formats(run):
    assert "more of" not in invoke(run, "--rows", "-1").stdout
    assert len(list(csv.DictReader(io.StringIO(invoke(run, "-f", "csv").stdout)))) == 13
    found = json.loads(invoke(run, "-f", "json").stdout)
    assert len(found) == 13
    assert found[0] == {
        "rule": "near-overflow",
        "severity": "serious",
        "rank": 0,
        "module": "layers.0",
        "tensor": "output",
        "path": "0",
        "since": 2,
        "step": 2,
        "value": 50002.0,
        "threshold": 16376.0,
        "note": "float16, which ends at 65504; 50005 at step 5",
    }


def test_a_run_with_nothing_to_report_says_what_was_checked(quiet):
    result = invoke(quiet, "--exit-code", "--rule", "near-overflow")
    assert (result.stdout, result.stderr) == ("No finding: 1 rule over 2 steps, 13 modules\n", "")
    assert invoke(quiet, "-f", "json").stdout == "[]\n"


def test_exit_code_is_one_only_when_asked_for(run, quiet):
    outcome = [check.main([*arguments], standalone_mode=False) for arguments in (
        [run], [run, "--exit-code"], [quiet, "--exit-code"], [run, "--exit-code", "--steps", ":2"]
    )]  # fmt: skip
    assert outcome == [0, 1, 0, 0]


def test_rules_thresholds_and_steps_are_chosen(run):
    found = json.loads(invoke(run, "-f", "json", "--rule", "gradient-spike", "--rule", "loss-spike").stdout)
    assert [line["rule"] for line in found] == ["gradient-spike"]
    found = json.loads(invoke(run, "-f", "json", "--set", "near-overflow.factor=1", "--steps", ":5").stdout)
    assert found == []
    assert "near-overflow" not in invoke(run, "--rule", "gradient-spike").stdout


def test_the_list_has_every_rule_with_its_thresholds_and_their_sources():
    text = invoke("--list").stdout
    for rule in all_rules():
        assert f"{rule.name} ({rule.severity}): {rule.title}\n" in text
    assert "  factor = 4 times: so many times the magnitude reaches the type's limit\n      source: our choice" in text
    changed = invoke("--list", "--rule", "dead-output", "--set", "dead-output.steps=7", "-f", "json").stdout
    (line,) = json.loads(changed)
    assert (line["rule"], line["threshold"], line["value"], line["unit"]) == ("dead-output", "steps", 7.0, "steps")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a RUN, or --list"),
        (["run.parquet", "--list"], "give a RUN, or --list"),
        (["run.parquet", "--rule", "near-overflw"], "no rule: 'near-overflw'; did you mean near-overflow?"),
        (["run.parquet", "--set", "near-overflow"], "'near-overflow' is not RULE.THRESHOLD=VALUE"),
        (["run.parquet", "--set", "factor=3"], "'factor=3' is not RULE.THRESHOLD=VALUE"),
        (["run.parquet", "--set", "near-overflow.factor=x"], "'x' is not a number, 0 or more"),
        (["run.parquet", "--set", "near-overflow.factor=-1"], "-1 is not a number, 0 or more"),
        (["run.parquet", "--set", "near-overflow.fctor=1"], "no threshold of near-overflow: 'fctor'; did you mean"),
    ],
)
def test_usage_errors(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_no_such_file(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such file"):
        invoke(str(tmp_path / "nope.parquet"))


def test_an_unfinished_run_is_checked_and_a_note_says_so(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("test", modules=MODULES))
    writer.write(batch_of_records(rows()))
    result = invoke(str(tmp_path / "run.parquet"), "--rule", "near-overflow", "--rows", "1")
    assert "12 findings: 1 rule over 6 steps" in result.stdout
    assert result.stderr.startswith("gradtrace: note: the run is still being recorded")
    writer.finish(RunInfo("test", end="completed"))


def test_names_of_rules_are_completed():
    (option,) = (option for option in check.params if "--rule" in option.opts)
    context = check.make_context("check", ["run.parquet"])
    items = option.shell_complete(context, "loss-s")
    assert {item.value for item in items} == {"loss-scale-collapse", "loss-spike", "loss-stuck"}
