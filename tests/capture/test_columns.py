"""Rows as columns: what a step shares with one before is used again, and nothing that has changed is."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
import torch

from gradtrace.capture.measures import Measure
from gradtrace.capture.rows import RowBuffer
from gradtrace.capture.statistics import Statistics
from gradtrace.trace.arrow import ARROW_SCHEMA

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)


class Owner:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def buffer() -> RowBuffer:
    return RowBuffer(3)


STATISTICS = Statistics()
LINEAR = Owner("linear")


def measured(*values: float) -> Measure:
    return STATISTICS.measure(torch.tensor(values))


def fill(buffer: RowBuffer, *measures: Measure, micro_step: int = 0, call: int = 0) -> pa.RecordBatch:
    for index, measure in enumerate(measures):
        buffer.append(micro_step, "forward", LINEAR, call, "output", str(index), measure)
    return buffer.batch(buffer.take(), 7, NOW)


def places(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return where the columns' data are, by name."""
    arrays = {name: batch.column(name) for name in batch.schema.names}
    indices = {name: a.indices if pa.types.is_dictionary(a.type) else a for name, a in arrays.items()}
    return {name: array.buffers()[1].address for name, array in indices.items()}


def test_a_batch_holds_what_was_appended(buffer: RowBuffer) -> None:
    batch = fill(buffer, measured(3.0, -4.0), measured(float("nan"), 2.0))
    assert batch.schema == ARROW_SCHEMA
    first, second = batch.to_pylist()
    assert (first["rank"], first["step"], first["seq"], first["time"]) == (3, 7, 0, NOW)
    assert (first["phase"], first["module"], first["tensor"], first["path"]) == ("forward", "linear", "output", "0")
    assert (first["dtype"], first["shape"], first["device"], first["numel"]) == ("float32", "[2]", "cpu", 2)
    assert (first["min"], first["max"], first["norm"], first["nan_count"]) == (-4.0, 3.0, 5.0, 0)
    assert (second["min"], second["max"], second["nan_count"], second["posinf_count"]) == (2.0, 2.0, 1, 0)


def test_a_step_like_the_one_before_makes_only_numbers(buffer: RowBuffer) -> None:
    one = fill(buffer, measured(1.0, 2.0), measured(3.0))
    other = fill(buffer, measured(5.0, 6.0), measured(7.0))
    before, after = places(one), places(other)
    made = {name for name in before if before[name] != after[name]}
    assert made <= {"step", "seq", "time", "min", "max", "norm"}
    assert other.column("max").to_pylist() == [6.0, 7.0]
    assert other.column("seq").to_pylist() == [2, 3]


def test_two_kinds_of_steps_by_turns_are_both_remembered(buffer: RowBuffer) -> None:
    long, short = fill(buffer, measured(1.0), measured(2.0)), fill(buffer, measured(1.0))
    again = fill(buffer, measured(1.0), measured(2.0)), fill(buffer, measured(1.0))
    assert [places(batch)["path"] for batch in again] == [places(long)["path"], places(short)["path"]]


def test_what_has_changed_is_never_taken_from_before(buffer: RowBuffer) -> None:
    fill(buffer, measured(1.0))
    assert fill(buffer, measured(1.0), micro_step=1).column("micro_step").to_pylist() == [1]
    assert fill(buffer, measured(1.0), call=2).column("call").to_pylist() == [2]
    assert fill(buffer, measured(1.0, 2.0)).column("shape").to_pylist() == ["[2]"]
    assert fill(buffer, STATISTICS.measure(torch.ones(1).double())).column("dtype").to_pylist() == ["float64"]
    assert fill(buffer, measured(float("inf"))).column("posinf_count").to_pylist() == [1]
    assert fill(buffer, measured(1.0)).column("posinf_count").to_pylist() == [0]
    LINEAR.name = "renamed"
    try:
        assert fill(buffer, measured(1.0)).column("module").to_pylist() == ["renamed"]
    finally:
        LINEAR.name = "linear"


def test_an_event_has_no_numbers(buffer: RowBuffer) -> None:
    buffer.append(0, "event", None, None, "skip", "", None, "why")
    buffer.append(0, "forward", LINEAR, 0, "output", "0", measured(float("nan")))
    event, row = buffer.batch(buffer.take(), 0, NOW).to_pylist()
    assert (event["tensor"], event["detail"], event["module"]) == ("skip", "why", None)
    unmeasured = ("dtype", "shape", "device", "numel", "nan_count", "posinf_count", "neginf_count", "min", "norm")
    assert [event[name] for name in unmeasured] == [None] * 9
    assert (row["nan_count"], row["posinf_count"]) == (1, 0)


def test_rows_wait_behind_the_first_whose_numbers_are_not_there(buffer: RowBuffer) -> None:
    late = Statistics(on_device=True)
    for measure in (measured(1.0), late.measure(torch.ones(2)), measured(2.0)):
        buffer.append(0, "forward", LINEAR, 0, "output", "0", measure)
    ready, waiting = buffer.take().ready()
    assert (ready.seqs, waiting.seqs) == ([0], [1, 2])
    late.resolve()
    ready, waiting = waiting.ready()
    assert (ready.seqs, len(waiting)) == ([1, 2], 0)


def test_a_final_gradient_is_written_where_it_differs_from_what_arrived(buffer: RowBuffer) -> None:
    good, bad = measured(1.0), measured(float("nan"))
    for final, arrived in ((good, [good]), (bad, [good]), (good, [bad]), (bad, [bad, good]), (good, [])):
        buffer.append(0, "optimizer", LINEAR, None, "grad", "weight", final, None, arrived)
    assert buffer.take().to_be_written().seqs == [1, 2]
