"""Traces a training that fails, and gives back what was said of it and of its replays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import gradtrace
from gradtrace.trace.confirmation import Confirmation


def rows_of(path: Path, query: str) -> list[tuple[Any, ...]]:
    with gradtrace.open_run(path) as run:
        return run.execute(query).fetchall()


def confirmations(path: Path) -> list[Confirmation]:
    found = rows_of(path, "SELECT detail FROM records WHERE phase = 'event' AND tensor = 'replay' ORDER BY seq")
    return [Confirmation.from_json(detail) for (detail,) in found]


def events(path: Path) -> list[tuple[int, str, str]]:
    query = "SELECT step, tensor, detail FROM records WHERE phase = 'event' AND tensor <> 'replay' ORDER BY seq"
    return rows_of(path, query)


def births(path: Path) -> list[tuple[Any, ...]]:
    """Return op, module, tensor, counts and detail of the births, in order."""
    return rows_of(
        path,
        "SELECT op, module, tensor, nan_count, posinf_count, neginf_count, detail FROM records"
        " WHERE phase = 'replay' AND detail IS NOT NULL ORDER BY seq",
    )


def line_of(mark: str, of: type | Callable[..., Any]) -> int:
    """Return the line on which the mark stands within ``of``."""
    lines, start = inspect.getsourcelines(of)
    return start + next(index for index, line in enumerate(lines) if mark in line)


def said_of(model: nn.Module | None, path: Path, run: Callable[[], Any], **options: Any) -> Confirmation:
    """Return what is said of the first replay while ``run`` trains."""
    with gradtrace.trace(model, path, **options):
        run()
    return confirmations(path)[0]
