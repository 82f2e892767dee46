"""What the soak tests share: the numbers that a test has measured are kept once it has passed.

``docs/soak.md`` is made of these files, so a number that stands there was asserted on in the run that it comes from.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import processor

RESULTS = Path(__file__).parent / "results"
DIGITS = 4
"""Significant digits of a number that is kept: more would only be noise in a diff."""

_REPORT = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what came of a test, for the fixture below."""
    report = yield
    if call.when == "call":
        item.stash[_REPORT] = report
    return report


@pytest.fixture
def result(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Give ``result(title, **numbers)``, to be called once; the file is written if the test passes.

    The title says what was done, in words. A name says the unit where there is one (``longest_pause_seconds``); its
    underscores become spaces on the page. A value is a number or a string; lists of numbers, under names of their own
    in a dictionary ``series``, are for a plot.
    """
    handed: dict[str, Any] = {}

    def hand(title: str, **numbers: object) -> None:
        assert not handed, "a soak test has one result"
        handed.update(title=title, numbers=rounded(numbers))

    yield hand
    report = request.node.stash.get(_REPORT, None)
    if handed and report is not None and report.passed:
        kept = {"test": _test_of(request), **handed, "seconds": rounded(report.duration), **machine()}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{_name_of(request)}.json").write_text(pretty(kept) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return a value with its floats, at any depth, at a few significant digits."""
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) >= 10**DIGITS else short
    return value


def machine() -> dict[str, object]:
    """Return what every number depends on."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("torch", "pyarrow", "duckdb")}
    return {"versions": versions, "processor": processor(), "cores": os.cpu_count()}


def pretty(value: Any, indent: int = 1) -> str:
    """Return JSON with a line for each key of a dictionary, however long a list is."""
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    margin = " " * indent
    lines = [f"{margin}{json.dumps(key)}: {pretty(each, indent + 1)}" for key, each in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + margin[1:] + "}"


def _test_of(request: pytest.FixtureRequest) -> str:
    return f"{Path(request.node.path).name}::{request.node.name}"


def _name_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")
