"""All of soak.md: made of what the long tests measured when they last passed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "tests" / "soak" / "results"

_HEAD = """\
# What the long tests measured

The tests in `tests/soak/` take minutes each. They are tests like all others: each asserts on what it measures, so a
number below is not only what was seen but also within the bar that its test sets. This page is made of the files in
`tests/soak/results/`, which a test writes when it passes.

To repeat all of them, one after the other: `make soak`. To repeat one: `make soak PYTEST_ARGS="-k NAME"`, with the name
that stands under it.

How memory, the cost of a step and the disk went in the longest of them:

![Resident memory, median step and bytes on disk over the steps of the long runs](soak.svg)
"""


def page() -> str:
    """Return the whole page."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    machines = list(dict.fromkeys(map(_machine, results)))
    parts = [_HEAD, "\n".join(f"* {_letter(number)}: {each}" for number, each in enumerate(machines)) + "\n"]
    for subject, of_file in groupby(sorted(results, key=lambda result: result["test"]), key=_subject):
        parts.append("\n".join(_section(subject, list(of_file), machines)) + "\n")
    return "\n".join(parts)


def _section(subject: str, results: list[Mapping[str, Any]], machines: list[str]) -> Iterator[str]:
    yield f"## {subject}"
    yield ""
    yield "| what was done | what came of it | took | on |"
    yield "|---|---|---:|---|"
    for result in results:
        name = result["test"].partition("::")[2]
        numbers = [f"{_words(key)}: {_number(value)}" for key, value in result["numbers"].items() if key != "series"]
        cells = [f"{_cell(result['title'])}<br>`{name}`", "<br>".join(map(_cell, numbers))]
        cells += [_duration(result["seconds"]), _letter(machines.index(_machine(result)))]
        yield f"| {' | '.join(cells)} |"


def _machine(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['processor']}, {result['cores']} cores, {versions}"


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _subject(result: Mapping[str, Any]) -> str:
    return _words(result["test"].partition("::")[0].removeprefix("test_").removesuffix(".py")).capitalize()


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_words(key)} {_number(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "yes" if value is True else "no" if value is False else str(value)
    return f"{value:,}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
