"""The documentation against what it documents: columns, queries, snippets, commands and links."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gradtrace_cli.main import cli

import gradtrace
from gradtrace.trace.confirmation import Confirmation
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import COLUMNS, Record
from tests.traces import write_run

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
COOKBOOK = (ROOT / "docs" / "sql-cookbook.md").read_text(encoding="utf-8")
COMMANDS = cli.list_commands(click.Context(cli))


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


QUERIES = _blocks(COOKBOOK, "sql")
SNIPPETS = _blocks(COOKBOOK, "python")


def _tensor(step: int, seq: int, tensor: str, phase: str, module: str | None, **values: object) -> Record:
    facts = {"numel": 4, "nan_count": 0, "posinf_count": 0, "neginf_count": 0, "dtype": "float32"}
    facts |= {"min": -1.0, "max": 1.0, "norm": 2.0, "shape": "[4]", "device": "cpu", "call": 0}
    return Record(step=step, seq=seq, phase=phase, tensor=tensor, module=module, **(facts | values))  # type: ignore[arg-type]


def _step(step: int) -> list[Record]:
    """One step of a model that grows by a factor of a hundred a step and makes NaN in step 2."""
    bad, scale = 2 * (step == 2), 100.0**step
    rows = (
        ("input", "input", "", {"path": "tokens", "dtype": "int64", "max": 60000.0, "norm": None}),
        ("input", "forward", "layer", {"path": "0"}),
        (
            "output",
            "forward",
            "layer",
            {"path": "", "max": 10 * scale, "nan_count": bad, "dtype": "float16"},
        ),
        ("output", "forward", "", {"path": "logits", "nan_count": bad}),
        ("loss", "loss", None, {"numel": 1, "max": scale}),
        ("grad", "backward", "layer", {"path": "weight", "norm": scale, "nan_count": bad}),
        ("lr", "optimizer", None, {"path": "0.0", "max": 0.1}),
        ("param", "optimizer", "layer", {"path": "weight", "nan_count": bad}),
        ("param", "optimizer", "layer", {"path": "bias"}),
    )
    first = len(rows) * step
    return [
        _tensor(step, first + number, tensor, phase, module, **values)
        for number, (tensor, phase, module, values) in enumerate(rows)
    ]


def _operations(step: int, first: int) -> list[Record]:
    """What --op-steps and a replay leave of one step."""
    layer = {"op": "DivBackward0", "file": "net.py", "line": 7}
    return [
        _tensor(step, first, "output", "forward", "layer", path="0", nan_count=2, **layer),
        _tensor(step, first + 1, "input", "replay", "layer", path="other", min=0.0, **layer),
        _tensor(step, first + 2, "output", "replay", "layer", path="0", nan_count=2, detail="{}", **layer),
        _tensor(step, first + 3, "replay", "event", None, detail=Confirmation("reproduced").to_json()),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps in which every query of the cookbook has something to find."""
    modules = [
        ModuleInfo("", "Net", root=True, calls=3),
        ModuleInfo("layer", "Linear", depth=1, parameters={"weight": "[2, 2]", "bias": "[2]"}, calls=3),
        ModuleInfo("spare", "Dropout", depth=1),
    ]
    path = tmp_path_factory.mktemp("run") / "run.parquet"
    records = [record for step in range(4) for record in _step(step)]
    return write_run(path, records + _operations(2, len(records)), modules=modules, command=["train.py"])


def _documented_columns() -> list[tuple[str, ...]]:
    text = (ROOT / "docs" / "columns.md").read_text(encoding="utf-8")
    table = text.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]


def test_the_page_of_columns_is_the_schema() -> None:
    expected = [
        (
            f"`{column.name}`",
            column.type,
            column.unit,
            column.meaning,
        )
        for column in COLUMNS
    ]
    assert _documented_columns() == expected


def test_the_cookbook_has_a_dozen_queries_and_four_ways_without_them() -> None:
    assert len(QUERIES) >= 12
    assert len(SNIPPETS) == 4


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_cookbook_finds_something(query: str, run: Path) -> None:
    with gradtrace.open_run(run) as opened:
        assert opened.sql(query).rows


def test_the_first_bad_records_come_in_order(run: Path) -> None:
    query = next(query for query in QUERIES if "LIMIT 20" in query)
    with gradtrace.open_run(run) as opened:
        rows = opened.sql(query).rows
    assert [row[:5] for row in rows[:2]] == [
        (20, 2, "forward", "layer", "output"),
        (21, 2, "forward", "", "output"),
    ]


def test_the_query_for_the_maker_names_the_module_with_finite_inputs(run: Path) -> None:
    query = next(query for query in QUERIES if "HAVING sum(" in query)
    with gradtrace.open_run(run) as opened:
        assert [row[1] for row in opened.sql(query).rows] == ["layer"]


def test_the_query_for_births_has_each_with_its_operands(run: Path) -> None:
    query = next(query for query in QUERIES if "WITH births" in query)
    with gradtrace.open_run(run) as opened:
        assert opened.sql(query).rows == [(2, "layer", "DivBackward0", "net.py", 7, 2, 0, "other", 0.0, 1.0)]


def test_the_query_for_the_operations_of_a_step_leaves_out_the_replay(run: Path) -> None:
    query = next(query for query in QUERIES if "phase <> 'replay'" in query)
    with gradtrace.open_run(run) as opened:
        assert [row[1:4] for row in opened.sql(query).rows] == [("forward", "layer", "DivBackward0")]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["duckdb", "pandas", "polars", "gradtrace"])
def test_plain_readers_find_the_largest_gradient_of_each_step(snippet: str, run: Path) -> None:
    done = subprocess.run([sys.executable, "-c", snippet], cwd=run.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = {float(number) for number in re.findall(r"\d+\.\d+(?:e[+]\d+)?", done.stdout)}
    assert {1.0, 100.0, 10000.0} <= numbers


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_in_its_help_and_is_in_the_readme(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert re.search(rf"^ *Examples?:\n +\$ gradtrace {name} ", result.output, flags=re.MULTILINE)
    assert re.search(rf"^gradtrace {name} ", README.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _command_lines() -> list[str]:
    lines = [
        line
        for page in PAGES
        for block in _blocks(page.read_text(encoding="utf-8"), "sh")
        for line in block.splitlines()
    ]
    return sorted({line.partition("gradtrace ")[2] for line in lines if "gradtrace " in line})


@pytest.mark.parametrize("line", _command_lines())
def test_every_documented_command_line_is_accepted(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    with command.make_context(name, arguments) as context:
        assert context.params


def test_every_documented_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"^make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_the_project_resolves(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        assert "://" not in link, "the documentation needs no network"
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    for page in PAGES:
        if page != README:
            assert f"({page.relative_to(ROOT).as_posix()})" in text
