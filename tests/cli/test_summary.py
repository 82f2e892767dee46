"""gradtrace summary, on the command itself."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner
from gradtrace_cli.main import cli
from traces import write_run

from gradtrace.errors import RunNotFoundError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

LONG = "encoder." + "a_rather_long_name." * 8 + "linear"
MODULES = [
    ModuleInfo("", "Net", root=True, calls=3),
    ModuleInfo(LONG, "Linear", depth=10, parameters={"weight": "[2, 2]"}, calls=3),
    ModuleInfo("head", "Linear", depth=1, calls=3),
]


def rows():
    for step in range(3):
        norm = {"norm": 10.0**step, "min": -1.0, "max": 2.0}
        bad = {"nan_count": 2}
        yield Record(step, 3 * step, "forward", "output", LONG, norm=1.5, min=-2.25, max=1.0)
        yield Record(step, 3 * step + 1, "backward", "grad", LONG, "weight", **(bad if step == 2 else norm))
        yield Record(step, 3 * step + 2, "forward", "output", "head", norm=1.0, max=100.0, posinf_count=1)


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "run.parquet", rows(), modules=MODULES, command=["train.py", "--lr", "3e-4"])
    return str(path)


def invoke(*arguments):
    result = CliRunner().invoke(cli, ["summary", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_line_a_module_under_a_heading(run):
    result = invoke(run)
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"{run}  train.py --lr 3e-4",
        "3 steps, 3 modules, 9 records, completed",
        "",
    ]
    assert lines[3].split("  ")[0] == "module"
    assert lines[5].split()[:3] == ["(root)", "Net", "0"]
    assert lines[6].split()[:6] == [LONG, "Linear", "4", "3", "6", "▁█!"]
    assert lines[6].split()[-2:] == ["1", "0"]
    assert lines[7].split()[0] == "head"
    assert len(lines) == 8
    assert (result.stderr, result.exit_code) == ("", 0)


def test_the_heading_counts_the_steps_that_were_captured_in_full(tmp_path):
    watched = [Record(step, 9 + step, "backward", "grad_norm", max=3.0, nan_count=0) for step in range(3, 7)]
    path = write_run(tmp_path / "run.parquet", [*rows(), *watched], modules=MODULES)
    lines = invoke(str(path)).stdout.splitlines()
    assert lines[1] == "7 steps, 3 captured in full, 3 modules, 13 records, completed"
    assert (
        lines[2] == "grad norm  ▁█!▄▄▄▄  last 3"
    )  # 1, 10, NaN, and 3 four times, in the middle of a logarithmic scale
    assert lines[3] == ""


def test_sort_puts_the_largest_first(run):
    names = [line["module"] for line in json.loads(invoke(run, "--sort", "inf", "-f", "json").stdout)]
    assert names == ["head", "", LONG]
    names = [line["module"] for line in json.loads(invoke(run, "--sort", "max_grad", "-f", "json").stdout)]
    assert names == [LONG, "", "head"]


def test_json_keeps_full_values_and_names_what_is_not_finite(run):
    lines = json.loads(invoke(run, "-f", "json").stdout)
    assert lines[1] == {
        "module": LONG,
        "type": "Linear",
        "parameters": 4,
        "calls": 3,
        "records": 6,
        "grad_norms": [1.0, 10.0, "NaN"],
        "grad_norm": 10.0,
        "output_norms": [1.5, 1.5, 1.5],
        "max_output": 2.25,
        "max_grad": 2.0,
        "max_param": None,
        "nan": 1,
        "inf": 0,
    }


def test_by_step_and_by_type_and_depth(run):
    steps = list(csv.DictReader(io.StringIO(invoke(run, "--by", "step", "-f", "csv").stdout)))
    assert [(step["step"], step["nan"], step["inf"]) for step in steps] == [
        ("0", "0", "1"),
        ("1", "0", "1"),
        ("2", "1", "1"),
    ]
    types = list(csv.DictReader(io.StringIO(invoke(run, "--by", "type", "-f", "csv").stdout)))
    assert [(line["type"], line["calls"]) for line in types] == [("Net", "3"), ("Linear", "6")]
    folded = list(csv.DictReader(io.StringIO(invoke(run, "--depth", "1", "-f", "csv").stdout)))
    assert [(line["module"], line["parameters"]) for line in folded] == [("", "4"), ("head", "0")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sort", "nrm"], "cannot sort by 'nrm'; there are: parameters, calls, records, grad_norm"),
        (["--sort", "loss"], "cannot sort by 'loss'"),
        (["--by", "step", "--depth", "1"], "--depth goes with --by module"),
    ],
)
def test_usage_errors(run, arguments, words):
    result = invoke(run, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_no_such_file(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such file"):
        invoke(str(tmp_path / "nope.parquet"))


def test_an_unfinished_run_is_read_and_a_note_says_so(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("test", modules=MODULES))
    writer.write(batch_of_records(rows()))
    result = invoke(str(tmp_path / "run.parquet"))
    assert "3 steps, 3 modules, 9 records, running" in result.stdout
    assert result.stderr.startswith("gradtrace: note: the run is still being recorded")
    writer.finish(RunInfo("test", end="completed"))


def test_help_has_an_example():
    assert "$ gradtrace summary run.parquet --depth 2" in invoke("--help").stdout
