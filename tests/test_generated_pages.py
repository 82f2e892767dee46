"""The generated parts of the documentation against what they are made from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

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
