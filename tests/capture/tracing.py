"""Traces a function, and gives back what was recorded as plain dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from gradtrace.capture.tracer import Tracer
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo

Row = dict[str, Any]

BOUNDARIES = ("input", "output", "grad_output", "grad_input")
"""What the column ``tensor`` holds at a module call."""


@dataclass(frozen=True)
class Recorded:
    """A finished recording: its rows in order of ``seq`` and what it says of the run."""

    rows: list[Row]
    info: RunInfo

    def where(self, **wanted: Any) -> list[Row]:
        """Return the rows whose columns have these values."""
        return [row for row in self.rows if all(row[key] == value for key, value in wanted.items())]

    def only(self, **wanted: Any) -> Row:
        """Return the one row whose columns have these values."""
        (row,) = self.where(**wanted)
        return row

    @property
    def steps_in_full(self) -> list[int]:
        """Return the steps that were captured in full: others have the norm of all their gradients instead."""
        watched = {row["step"] for row in self.where(tensor="grad_norm")}
        return sorted({row["step"] for row in self.rows} - watched)

    def boundaries(self) -> list[Row]:
        """Return the rows of module calls, forward and backward."""
        return [row for row in self.rows if row["tensor"] in BOUNDARIES]

    def columns(self, *names: str, **wanted: Any) -> list[tuple[Any, ...]]:
        """Return some columns of the rows that ``where`` returns."""
        return [tuple(row[name] for name in names) for row in self.where(**wanted)]


def record(
    models: nn.Module | Mapping[str, nn.Module] | None,
    path: Path,
    train: Callable[[], object],
    **options: Any,
) -> Recorded:
    """Run ``train`` under a tracer that writes into the directory ``path``, and read the recording."""
    file = path / "run.parquet"
    with Tracer(models, file, existing="overwrite", **options):
        train()
    return read(file)


def read(file: Path) -> Recorded:
    """Read a finished recording."""
    table = pq.read_table(file)
    info = RunInfo.from_json(table.schema.metadata[METADATA_KEY], str(file))
    return Recorded(table.to_pylist(), info)


def assert_holds(row: Row, tensor: Tensor) -> None:
    """Check a row's statistics against those of a tensor of finite numbers, taken in float64."""
    values = tensor.detach().to(torch.float64)
    assert row["shape"] == str(list(tensor.shape))
    assert row["numel"] == tensor.numel()
    assert (row["nan_count"], row["posinf_count"], row["neginf_count"]) == (0, 0, 0)
    expected = (values.min().item(), values.max().item(), values.norm().item())
    assert (row["min"], row["max"], row["norm"]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def assert_same_rows(left: Iterable[Row], right: Iterable[Row]) -> None:
    """Check that both hold the same boundaries with the same numbers, in whatever order."""
    one, other = _by_place(left), _by_place(right)
    assert one.keys() == other.keys()
    for place, row in one.items():
        _assert_same_numbers(place, row, other[place])


_PLACE = ("step", "micro_step", "phase", "module", "call", "tensor", "path", "detail")
_EXACT = ("dtype", "shape", "device", "numel", "nan_count", "posinf_count", "neginf_count")
_MEASURED = ("min", "max", "norm")


def _by_place(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    places: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        place = tuple(row[name] for name in _PLACE)
        assert place not in places, f"recorded twice: {place}"
        places[place] = row
    return places


def _assert_same_numbers(place: tuple[Any, ...], row: Row, other: Row) -> None:
    assert [row[name] for name in _EXACT] == [other[name] for name in _EXACT], place
    for name in _MEASURED:
        if row[name] is None or other[name] is None:
            assert row[name] == other[name], place
        else:
            assert row[name] == pytest.approx(other[name], rel=1e-6, abs=1e-9), place
