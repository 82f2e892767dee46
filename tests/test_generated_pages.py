"""The generated parts of the documentation against what they are made from."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import click
import pytest
from gradtrace_cli.main import cli

DOCS = Path(__file__).parent.parent / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load("generate")


@pytest.mark.parametrize("page", generate.PAGES)
def test_every_generated_page_is_up_to_date(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert generate.make(page, text) == text, "run: make docs"


def test_every_page_with_generated_parts_is_made_by_the_one_script() -> None:
    marked = {page.name for page in DOCS.glob("*.md") if "<!-- generated: " in page.read_text(encoding="utf-8")}
    assert marked == set(generate.PARTLY)


def test_the_page_of_commands_has_the_help_of_each_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    made = load("commands_page").page("By hand.\n<!-- generated: commands -->\nold\n<!-- end of commands -->\n")
    assert made.startswith(
        "By hand.\n<!-- generated: commands -->\n\n## gradtrace\n\n```text\nUsage: gradtrace [OPTIONS]"
    )
    for name in cli.list_commands(click.Context(cli)):
        assert f"\n## gradtrace {name}\n\n```text\nUsage: gradtrace {name} [OPTIONS] " in made
    assert "\nold\n" not in made
    assert "  RUN is a recording: a file, the directory of several ranks, or a glob.\n" in made  # 73 columns


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has 0 parts with the commands"):
        load("commands_page").page("By hand.\n")


def test_the_script_writes_only_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in generate.PAGES:
        (tmp_path / page).write_text("current\n", encoding="utf-8")
    (tmp_path / "commands.md").write_text("old\n", encoding="utf-8")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "make", lambda page, text: "current\n")
    generate.main()
    assert (tmp_path / "commands.md").read_text(encoding="utf-8") == "current\n"
    assert capsys.readouterr().out == "docs/commands.md is new\n"


def test_every_result_on_the_page_of_long_runs_is_that_of_a_test_that_there_is() -> None:
    soak = DOCS.parent / "tests" / "soak"
    defined = {
        (file.name, node.name)
        for file in soak.glob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and "result" in [argument.arg for argument in node.args.args]
    }
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in soak.glob("results/*.json")]
    named = {(file, test.partition("[")[0]) for file, _, test in (each["test"].partition("::") for each in kept)}
    assert named <= defined


def test_the_page_of_long_runs_says_what_was_done_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"versions": {"python": "3.11.7", "torch": "2.13.0"}, "processor": "Fast", "cores": 2}
    numbers = {"runs": 12000, "steps_lost": 0, "seconds_to_answer": {"sql": 0.5}, "series": {"step": [1, 2]}}
    one = {"test": "test_kills.py::test_one", "title": "killed | often", "numbers": numbers, "seconds": 61.2, **facts}
    other = {**one, "test": "test_slow_disk.py::test_two[a]", "cores": 4, "seconds": 300.0}
    for name, result in (("one", one), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    page = load("soak_page")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    made = page.page()
    assert "* A: Fast, 2 cores, python 3.11.7, torch 2.13.0\n* B: Fast, 4 cores, python 3.11.7, torch 2.13.0\n" in made
    came_of_it = "runs: 12,000<br>steps lost: 0<br>seconds to answer: sql 0.5"
    assert "\n## Kills\n\n| what was done | what came of it | took | on |\n|---|---|---:|---|\n" in made
    assert f"| killed \\| often<br>`test_one` | {came_of_it} | 61 s | A |\n" in made
    assert "\n## Slow disk\n" in made and f"`test_two[a]` | {came_of_it} | 5 min | B |\n" in made


def test_the_picture_of_long_runs_has_their_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = {"step": [100, 200], "resident_MiB": [10.0, 20.0], "step_ms": [1.0, 1.0], "disk_MB": [0.0, 0.0]}
    long = {"test": "test_long_runs.py::test_a<b", "numbers": {"steps": 200, "series": series}}
    (tmp_path / "long.json").write_text(json.dumps(long), encoding="utf-8")
    (tmp_path / "short.json").write_text(json.dumps({"test": "t.py::t", "numbers": {"runs": 1}}), encoding="utf-8")
    plot = load("soak_plot")
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    picture = ElementTree.fromstring(plot.page())
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "test_a<b" and "step 200" in words and "22" in words  # the axis: a tenth more than the highest
    lines = [element.attrib["points"] for element in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    # Half way along and at the end of 250; 10 and 20 of 22 up from the bottom of a height of 90 at 130.
    assert lines[0] == "175.0,89.1 300.0,48.2"
    assert len(lines) == 3
