"""The documentation against what it documents: columns, queries, commands, names and links."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gradtrace_cli.main import cli

import gradtrace
from gradtrace.analysis import replay_text, verdict_text
from gradtrace.analysis.verdict_model import Cause, Fate
from tests.documentation import DOCS, PAGES, README, ROOT, blocks_of, table, write_recording

COLUMNS = DOCS / "columns.md"
COOKBOOK = DOCS / "sql-cookbook.md"
READING = DOCS / "reading-a-verdict.md"
ARCHITECTURE = DOCS / "architecture.md"
QUERIES = blocks_of(COOKBOOK, "sql")
COMMANDS = cli.list_commands(click.Context(cli))
GOLDEN = sorted((ROOT / "tests" / "cli" / "golden").glob("first_nan*.txt"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("run") / "run.parquet")


# Columns and queries ----------------------------------------------------------------------------------------


def test_the_page_of_columns_is_the_schema_and_the_views() -> None:
    spec = importlib.util.spec_from_file_location("columns_page", DOCS / "columns_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = COLUMNS.read_text(encoding="utf-8")
    assert module.page(text) == text
    with pytest.raises(ValueError, match="0 tables of views"):
        module.page(text.replace("<!-- end of views -->", ""))


def test_every_column_of_every_view_is_on_the_page(run: Path) -> None:
    """Asked of a recording's own views, not of what the page is made from."""
    documented = {tuple(row[:2]) for row in table(COLUMNS, "| view | column | type | unit | meaning |")}
    records = {row[0] for row in table(COLUMNS, "| column | type | unit | meaning |")}
    with gradtrace.open_run(run) as opened:
        for view in ("records", "params", "grads", "steps", "modules", "events", "meta"):
            names = {f"`{name}`" for name in opened.sql(f"SELECT * FROM {view}").columns}
            assert names == (
                {column for of, column in documented if of == f"`{view}`"}
                if view in ("steps", "modules", "events", "meta")
                else records
            )


def test_the_cookbook_has_a_dozen_queries() -> None:
    assert len(QUERIES) >= 12


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


# Commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_in_its_help_and_is_in_the_readme(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert re.search(rf"^ *Examples?:\n +\$ gradtrace {name} ", result.output, flags=re.MULTILINE)
    assert re.search(rf"^gradtrace {name} ", blocks_of(README, "sh")[0], flags=re.MULTILINE)


def _command_lines() -> list[str]:
    lines = [line for page in PAGES for block in blocks_of(page, "sh") for line in block.splitlines()]
    return sorted({line.partition("gradtrace ")[2] for line in lines if "gradtrace " in line})


@pytest.mark.parametrize("line", _command_lines())
def test_every_documented_command_line_is_accepted(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    group = click.Context(
        cli, **cli.context_settings
    )  # a command keeps the help option of the first context that it meets
    command = cli.get_command(group, name)
    assert command is not None
    with command.make_context(name, arguments, parent=group) as context:
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


# The verdict ------------------------------------------------------------------------------------------------


def test_the_table_of_keys_has_what_a_verdict_gives(run: Path) -> None:
    with gradtrace.open_run(run) as opened:
        keys = [f"`{key}`" for key in opened.first_nan().to_dict()]
    named = [key for row in table(READING, "| key | what it holds |") for key in row[0].split(", ")]
    assert sorted(named) == sorted(keys)


def test_the_keys_of_inner_objects_are_those_of_a_verdict(run: Path) -> None:
    with gradtrace.open_run(run) as opened:
        answer = opened.first_nan().to_dict()
    for key, cell in table(READING, "| key | what it holds |"):
        inner = re.search(r"\{(.+?)\}", cell)
        if inner is None:
            continue
        value = answer[key.strip("`")]
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, dict):
            assert inner[1].replace("`", "").split(", ") == list(value), key


def test_every_label_of_a_verdict_is_explained_and_no_other() -> None:
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (verdict_text, replay_text)]
    patterns = (r'_line\("([a-z ]+)"', r'yield "([a-z ]+)", ', r'label = "([a-z ]+)"', r'else "(first [a-z]+)"')
    labels = {label for text in sources for pattern in patterns for label in re.findall(pattern, text)}
    labels |= {"within", "made by"}  # the two that one line has, as it is known or not which operation it was
    assert {row[0].strip("`") for row in table(READING, "| label | it says | do |")} == labels


def test_the_words_of_a_verdict_are_those_that_it_has() -> None:
    explained = {row[0].strip("`") for row in table(READING, "| word | meaning |")}
    assert explained >= {fate.value for fate in Fate} | {"reached", "handled", "received"}


def test_the_phases_are_those_of_a_verdict_with_what_it_says_made_it() -> None:
    """The phrases that are quoted are looked up where they come from."""
    rows = table(READING, "| phase | `made by` or `within` says | usual cause | next |")
    assert [row[0].strip("`") for row in rows if row[0]] == list(dict.fromkeys(cause.phase for cause in Cause))
    source = Path(verdict_text.__file__ or "").read_text(encoding="utf-8")
    quoted = [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row[1])]
    assert len(quoted) == len(rows)
    for phrase in quoted:
        assert phrase in source, phrase


def test_what_the_page_shows_of_verdicts_is_shown_by_real_ones() -> None:
    """Each block of it stands as it is in an output that another test compares with the command's."""
    shown = [text for page in (README, DOCS / "quick-start.md") for text in blocks_of(page, "text")]
    shown += [path.read_text(encoding="utf-8") for path in GOLDEN]
    quoted = blocks_of(READING, "text")
    assert len(quoted) > 5
    for text in quoted:
        assert any(text in output for output in shown), text


# Limits -----------------------------------------------------------------------------------------------------


def _messages() -> str:
    """Return the sources, their strings that go on in the next line put together."""
    paths = [path for top in ("gradtrace", "cli") for path in (ROOT / top).rglob("*.py")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in paths))


def test_what_the_limits_are_said_to_say_is_what_is_said() -> None:
    """An ellipsis stands for what differs from case to case."""
    text = " ".join((DOCS / "limits.md").read_text(encoding="utf-8").split())
    said = re.findall(r'"([^"]+)"', text)
    assert len(said) > 30
    messages = _messages()
    unknown = {part for words in said for part in re.split(r"[….]", words) if part.strip(" ,:()") not in messages}
    assert not unknown


# Names and links --------------------------------------------------------------------------------------------


_NAMED = re.compile(r"(?<![\w/.])(?:gradtrace|cli|tests|examples|docs)/[a-z0-9_/-]*(?:\.(?:py|sql|md|ipynb))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_the_project_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^```(?!text).*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in _NAMED.findall(text):
        assert (ROOT / name).exists(), name


def test_the_picture_of_the_architecture_names_files_that_exist() -> None:
    """A name without a folder is that of a file beside the one named last."""
    picture = next(text for text in blocks_of(ARCHITECTURE, "text") if "interception.py" in text)
    names = re.findall(r"[\w/]+\.(?:py|sql)\b", picture)
    assert len(names) > 20
    folder = ROOT
    for name in names:
        if "/" in name:
            path = ROOT / name if name.startswith("cli/") else ROOT / "gradtrace" / name
            folder = path.parent
        else:
            path = folder / name
        assert path.is_file(), name


def test_every_room_is_in_the_architecture_and_no_other() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rooms = {path.parent for top in ("gradtrace", "cli") for path in (ROOT / top).rglob("__init__.py")}
    names = {f"{room.relative_to(ROOT).as_posix()}/" for room in rooms}
    rows = {row[0].strip("`") for row in table(ARCHITECTURE, "| room | what it is for |")}
    assert names <= rows
    assert {"gradtrace/errors.py", "gradtrace/settings.py"} <= rows
    assert "lint-imports" in text


def test_the_layers_of_the_architecture_are_those_that_are_kept() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = re.search(r'name = "(cli -> .*)"', contract)
    assert line is not None and line[1] in ARCHITECTURE.read_text(encoding="utf-8")


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
