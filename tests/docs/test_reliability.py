"""The page of what was done to gradtrace on purpose, against the tests that it names."""

from __future__ import annotations

import re

from tests.documentation import DOCS, ROOT

PAGE = (DOCS / "reliability.md").read_text(encoding="utf-8")
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
COLUMNS = ["fault", "how it was injected", "how often", "what was lost", "what the user sees", "test"]


def rows_below(*columns: str) -> list[list[str]]:
    """Return the rows of all tables of the page that have these columns."""
    head = "| " + " | ".join(columns) + " |"
    tables = [part.split("\n\n")[0] for part in PAGE.split(head)[1:]]
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\btest_\w+", PAGE))
    there = {name for text in SOURCES.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert len(named) > 100
    assert named <= there | {path.stem for path in SOURCES}


def test_every_way_to_die_that_the_page_names_is_one_of_the_test() -> None:
    deaths = PAGE.split("## Death")[1].split("\n## ")[0]
    ways = {
        way for row in re.findall(r"\| ([^|]*) \|$", deaths, re.MULTILINE) for way in re.findall(r"\*([^*]+)\*", row)
    }
    text = (ROOT / "tests" / "integrations" / "test_death.py").read_text(encoding="utf-8")
    assert len(ways) > 20
    assert {way for way in ways if f'"{way}"' not in text} == set()


def test_every_fault_and_every_bug_names_a_test() -> None:
    faults, bugs = rows_below(*COLUMNS), rows_below("kind", "what happened", "mended how", "test")
    assert len(faults) > 80
    assert len(bugs) > 80
    assert all(len(row) == 6 for row in faults)
    assert all(len(row) == 4 for row in bugs)
    assert not [row[0] for row in [*faults, *bugs] if not row[-1]]
