"""gradtrace diff, on the command itself."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner
from gradtrace_cli.diff import diff

from gradtrace.errors import NoMatchError, RunNotFoundError
from gradtrace.trace.runinfo import ModuleInfo
from tests.analysis.rows import MODULES, Rows, backward, forward, healthy, update
from tests.documentation import DOCS, blocks_of, table
from tests.traces import write_run

PAGE = DOCS / "diff.md"


def invoke(*arguments):
    result = CliRunner().invoke(diff, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def exit_code(*arguments):
    return CliRunner().invoke(diff, ["--exit-code", *arguments], standalone_mode=False).return_value


def changed(values, lr=0.1):
    """Return three steps; in step 1 the output of act has these values."""
    rows = Rows()
    healthy(rows, 1)
    forward(rows, act=values)
    backward(rows)
    update(rows, lr=lr)
    rows.step += 1
    healthy(rows, 1)
    return rows


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, rows, **info):
        write_run(tmp_path / name, rows.records, **({"modules": MODULES} | info))
        return name

    return write


def test_what_changed_then_the_first_difference_then_the_modules_as_the_page_shows_it(write):
    a = write("a.parquet", changed({}), command=["train.py", "--lr", "0.1"], versions={"torch": "2.13.0"})
    b = write(
        "b.parquet",
        changed({"norm": 52.0}, lr=0.2),
        command=["train.py", "--lr", "0.2"],
        versions={"torch": "2.14.0"},
        config={"every": 2},
        modules=[*MODULES[:2], ModuleInfo("act", "GELU", depth=1), MODULES[3], ModuleInfo("ema", "Linear")],
    )
    result = invoke(a, b)
    (shown,) = blocks_of(PAGE, "text")
    assert "$ gradtrace diff a.parquet b.parquet\n" + result.stdout == shown
    assert (result.stderr, result.exit_code) == ("", 0)


def test_no_difference(write):
    run = write("a.parquet", changed({}))
    result = invoke(run, run)
    assert result.stdout.splitlines()[-3:] == [
        "  compared    57 records; 3 steps, 0 to 2",
        "",
        "No difference in 57 records (0.035 % tolerated in float32).",
    ]
    assert exit_code(run, run) == 0


def test_nan_shape_and_integers_in_words(write):
    base = write("a.parquet", changed({}))
    for values, words in (
        ({"nan_count": 3}, "  0 nan in A, 3 nan in B"),
        ({"neginf_count": 2}, "  0 -inf in A, 2 -inf in B"),
        ({"shape": "[2, 4]"}, "  shape [8] in A, [2, 4] in B"),
        ({"max": 25.1, "min": -25.1}, "  max 25 in A, 25.1 in B, 0.4 % apart (0.035 % is tolerated)"),
    ):
        other = write(f"{len(words)}.parquet", changed(values))
        assert words in invoke(base, other).stdout.splitlines()
    tokens = {"dtype": "int64", "norm": None}
    one, other = (write(f"{top}.parquet", changed(tokens | {"max": top})) for top in (70_000.0, 70_001.0))
    words = "  max 70000 in A, 70001 in B, 0.0014 % apart (these must be equal)"
    assert words in invoke(one, other).stdout.splitlines()


def test_a_value_far_below_a_percent_is_told_with_the_digits_that_it_takes(write):
    a, b = (write(f"{top}.parquet", changed({"max": top})) for top in (25.0, 25.000001))
    words = "  max 25 in A, 25.000001 in B, 4e-06 % apart (these must be equal)"
    assert words in invoke("--rtol", "0", a, b).stdout.splitlines()


def test_steps_and_records_that_only_one_run_has_are_said(write):
    longer = changed({})
    healthy(longer, 2)
    extra = changed({})
    extra.step = 2
    extra.add("forward", "ema", "output")
    extra.add("evaluation", None, "loss", "")
    a, b = write("a.parquet", longer), write("b.parquet", extra)
    lines = invoke(a, b).stdout.splitlines()
    assert "  compared    57 records; 3 steps, 0 to 2; 2 more steps in A" in lines
    assert "  B alone     has 2 records in common steps, from step 2 on: outside any module (1), ema (1)" in lines
    assert lines[-1] == "No difference in 57 records that both have (0.035 % tolerated in float32)."
    assert exit_code(a, b) == 1


def test_json_has_one_object(write):
    a = write("a.parquet", changed({}), command=["train.py"])
    b = write("b.parquet", changed({"nan_count": 3}), command=["train.py"])
    found = json.loads(invoke("--json", a, b).stdout)
    keys = [key for row in table(PAGE, "| key | meaning |") for key in re.findall("`(.*?)`", row[0])]
    assert list(found) == keys
    for key in found["a"]:
        assert f"`{key}`" in PAGE.read_text()
    for key in found["first"]["a"].keys() | found["first"].keys():
        assert f"`{key}`" in PAGE.read_text() or key.endswith("_count")
    assert (found["found"], found["compared"], found["differing"]) == (True, 57, 1)
    assert found["a"]["command"] == ["train.py"]
    first = found["first"]
    assert (first["step"], first["module"], first["module_type"], first["statistic"]) == (1, "act", "ReLU", "nan_count")
    assert (first["difference"], first["a"]["nan_count"], first["b"]["nan_count"]) == ("Infinity", 0, 3)
    assert first["b"]["shape"] == [8]
    assert [(line["module"], line["worst"]["step"]) for line in found["modules"]] == [("act", 1)]


def test_json_names_a_learning_rate_that_is_not_finite(write):
    rows = Rows()
    forward(rows)
    backward(rows)
    update(rows, lr=None, lr_counts={"nan_count": 1})
    other = Rows()
    healthy(other, 1)
    found = json.loads(invoke("--json", write("a.parquet", other), write("b.parquet", rows)).stdout)
    assert found["scalars"] == [
        {"tensor": "lr", "path": "0.0", "rank": 0, "step": 0, "a": 0.1, "b": "NaN", "records": 1}
    ]


def test_options_reach_the_comparison(write):
    a, b = write("a.parquet", changed({})), write("b.parquet", changed({"norm": 26.1}))
    assert invoke(a, b).exit_code == 0
    assert exit_code(a, b) == 1
    assert exit_code("--rtol", "0.01", a, b) == 0
    assert exit_code("--steps", "2:", a, b) == 0
    assert exit_code("-M", "fc*", a, b) == 0
    assert exit_code("--rank", "0", a, b) == 1
    assert "Furthest apart" not in invoke("--rows", "0", a, b).stdout
    with pytest.raises(NoMatchError):
        invoke("--rank", "1", a, b)


def test_bad_input_is_said(write):
    run = write("a.parquet", changed({}))
    with pytest.raises(RunNotFoundError, match=r"no such file: nope\.parquet"):
        invoke(run, "nope.parquet")
    for arguments, words in (
        (["--rtol", "-1"], "-1 is not a number, 0 or more"),
        (["--rtol", "nan"], "nan is not a number, 0 or more"),
        (["--steps", "3"], "'3' is not A:B"),
    ):
        result = invoke(*arguments, run, run)
        assert result.exit_code == 2
        assert words in result.stderr


def test_notes_say_whose_they_are(write):
    a = write("a.parquet", changed({}))
    b = write("b.parquet", changed({}), unmeasured={"sparse": 4})
    result = invoke(a, b)
    assert result.stderr == "gradtrace: note: B: 4 boundaries were seen and not recorded: sparse\n"


def test_help_has_an_example():
    assert "$ gradtrace diff run.1.parquet run.parquet" in invoke("--help").stdout
