"""The cases: a training script each, with a JSON file of the same name that holds the right verdict.

``given/`` holds the cases that the project was measured by from the start, ``own/`` those added later; README.md
explains the keys. Nothing here knows what a tool answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent
GROUPS = ("given", "own")

# The keys of a verdict that another reading under `accept` may replace.
READING = ("step", "phase", "module", "tensor", "op")


@dataclass(frozen=True)
class Case:
    """One script and what is right to say of it; ``lines`` are the source lines that may be named, from 1."""

    id: str
    group: str
    script: Path
    truth: dict[str, Any]
    lines: tuple[int, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong, so that the right verdict is none."""
        return bool(self.truth["false_alarm"])

    def readings(self) -> Iterator[dict[str, Any]]:
        """Yield the right verdict and the others that are as good, each as a dict of the keys in READING."""
        main = {key: self.truth[key] for key in READING}
        for other in ({}, *self.truth["accept"]):
            yield main | {key: value for key, value in other.items() if key in READING}


def load(only: Iterable[str] = ()) -> list[Case]:
    """Return the cases in order, or those whose id starts with one of ``only``.

    Raises SystemExit where one of ``only`` fits no case.
    """
    cases = [_read(path, group) for group in GROUPS for path in sorted((HOME / group).glob("*.py"))]
    wanted = tuple(only)
    for word in wanted:
        if not any(case.id.startswith(word) for case in cases):
            raise SystemExit(f"benchmarks.zoo: error: no case starts with {word!r}")
    return [case for case in cases if not wanted or case.id.startswith(wanted)]


def _read(script: Path, group: str) -> Case:
    truth = json.loads(script.with_suffix(".json").read_text())
    return Case(script.stem, group, script, truth, tuple(_line(script, code) for code in _codes(script, truth)))


def _codes(script: Path, truth: dict[str, Any]) -> list[str]:
    """Return the text of the lines that may be named: the given cases have them in a file of their own."""
    if "line" in truth:
        return [truth["line"]] if isinstance(truth["line"], str) else list(truth["line"])
    beside = script.with_name("lines.json")
    lines: dict[str, list[str]] = json.loads(beside.read_text()) if beside.exists() else {}
    return lines.get(script.stem, [])


def _line(script: Path, code: str) -> int:
    """Return the number of the one line that reads ``code``, spaces aside.

    Raises ValueError where there are none or several.
    """
    lines = enumerate(script.read_text().splitlines(), 1)
    found = [number for number, line in lines if line.split() == code.split()]
    if len(found) != 1:
        raise ValueError(f"{script.name} has {len(found)} lines that read {code!r}, not one")
    return found[0]
