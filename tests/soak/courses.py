"""What the tests of odd runs share: a small model, its step, and a repetition that is looked at meanwhile."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.capture.steps import _MOST_ROWS
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from tests.live_objects import live

GROWTH = 1.5
"""How many times as long as in the second quarter a pass may take in the last one: some are only 0.2 ms long."""
BOUNDED = {"Measure": 2 * _MOST_ROWS, "Watched": 1000, "_Part": 200, "Plan": 200, "Thinned": 2}
"""What may be there more often in the end than half way, and how much: rows are written in pieces of 100,000, of the
calls of a step the newest 1,000 are followed, and a file is made of parts while it is written."""


class Net(nn.Module):
    """Two layers, and a mask of -inf within, which matters to nobody and is looked at all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.mask = nn.Softmax(-1)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.mask(torch.tensor([0.0, -torch.inf] * 4))
        result: Tensor = self.last(self.first(x).tanh() * weights)
        return result


@dataclass
class Course:
    """How a run went: seconds of each repetition, what there was of objects half way and in the end."""

    times: list[float] = field(default_factory=list)
    half_way: Counter[str] = field(default_factory=Counter)
    at_the_end: Counter[str] = field(default_factory=Counter)
    most_rows: int = 0

    @property
    def growth(self) -> float:
        """The median of the last quarter as a multiple of that of the second."""
        quarter = len(self.times) // 4
        return statistics.median(self.times[-quarter:]) / statistics.median(self.times[quarter : 2 * quarter])

    @property
    def grown(self) -> dict[str, int]:
        """Types of which there are more in the end than half way."""
        more = self.at_the_end - self.half_way
        return {kind: count for kind, count in more.items() if count > BOUNDED.get(kind, 0)}

    def of_bounded_cost(self) -> dict[str, int | float]:
        """See that nothing has grown, and give what there is to tell of it."""
        assert self.grown == {}
        assert self.growth <= GROWTH
        return {
            "most_rows_in_memory": self.most_rows,
            "kinds_of_objects_grown": 0,
            "last_passes_to_earlier": self.growth,
        }


def run(tracer: Tracer, times: int, repeat: Callable[[int], None]) -> Course:
    """Repeat something, with the garbage collector off, and look at it meanwhile."""
    course = Course()
    gc.collect()
    gc.disable()
    try:
        for number in range(times):
            start = time.perf_counter()
            repeat(number)
            course.times.append(time.perf_counter() - start)
            course.most_rows = max(course.most_rows, len(tracer._session.rows))
            if number + 1 == times // 2:
                course.half_way = live()
        course.at_the_end = live()
    finally:
        gc.enable()
    assert tracer.info.end == "running"
    assert course.most_rows <= _MOST_ROWS + 1000
    return course


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.randn(3, 4)).square().mean() * factor).backward()
    optimizer.step()


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Give what gradtrace says meanwhile: the words, since a warning that is kept would count as one of its objects."""
    words: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: object) -> None:
        if category is GradtraceWarning:
            words.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield words


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with gradtrace.open_run(path) as opened:
        return opened.sql(sql).rows
