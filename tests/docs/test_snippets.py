"""The Python that the pages show runs, with nothing but what the page says is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace
from tests.documentation import DOCS, PAGES, README, blocks_of, write_recording

COOKBOOK = DOCS / "sql-cookbook.md"
WITH_PYTHON = [page for page in PAGES if blocks_of(page, "python") and page != DOCS / "quick-start.md"]


def _training() -> dict[str, Any]:
    """What pages take for granted that show how a program of one's own is recorded."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(4, 2), torch.zeros(4, 2)]

    def train_step(model: Callable[[Any], Any], batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    def train(model: Callable[[Any], Any]) -> None:
        for batch in batches:
            train_step(model, batch)

    return {"gradtrace": gradtrace, "model": model, "batches": batches, "train_step": train_step, "train": train}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {"integrations.md": _training, "configuration.md": _training}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_block_by_block(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name not in GIVEN:  # those make a recording
        write_recording(tmp_path / "run.parquet")
        write_recording(tmp_path / "other.parquet", healthy=True)
    for text in filter(_runs_here, blocks_of(page, "python")):
        _run(text, page, GIVEN.get(page.name, dict)())
    if page == COOKBOOK:  # its ways of reading without gradtrace are different ways to ask the same
        _assert_largest_gradients(capfd.readouterr().out, len(blocks_of(page, "python")))


def _runs_here(text: str) -> bool:
    """Two kinds of snippets have tests of their own, since they need more.

    Trainers are large packages (tests/integrations/test_callbacks.py); other readers read several ranks
    (tests/trace/test_readers.py).
    """
    return not any(mark in text for mark in ("from gradtrace.integrations import", "run.parquet/*", '"*.parquet"'))


def _run(text: str, page: Path, given: dict[str, Any]) -> None:
    exec(compile(text, str(page), "exec"), {"__name__": "__main__", **given})


def _assert_largest_gradients(printed: str, ways: int) -> None:
    numbers = [float(number) for number in re.findall(r"\d+\.\d+(?:e[+]\d+)?", printed)]
    assert ways == 4
    for value in (1.0, 100.0, 10000.0):
        assert numbers.count(value) == ways


def test_a_snippet_that_fails_is_noticed() -> None:
    with pytest.raises(NameError):
        _run("print(model)", README, {})
