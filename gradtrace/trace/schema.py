"""The columns of a trace: their names, types, units and meaning, and the history of their version.

One row is one record: one tensor seen at one boundary. Everything that writes or reads a trace takes the
columns from here; the documentation and ``gradtrace sql --schema`` are made from the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

SCHEMA_VERSION = 1
# 1  first version

PHASES = (
    "input",
    "forward",
    "evaluation",
    "recompute",
    "loss",
    "backward",
    "optimizer",
    "replay",
    "event",
)
TENSORS = (
    "input",
    "output",
    "grad_input",
    "grad_output",
    "param",
    "grad",
    "buffer",
    "loss",
    "lr",
    "loss_scale",
)
EVENTS = ("skip", "incident", "replay", "switch", "stop", "lost")

_NAME = pa.dictionary(pa.int32(), pa.string())


class Column(NamedTuple):
    """One column of the trace: its Arrow type, the unit of its values and what they mean."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str


COLUMNS = (
    Column("rank", pa.int32(), "", "process number, 0 without torch.distributed"),
    Column("step", pa.int64(), "steps", "optimizer step, from 0 (or from --first-step)"),
    Column("micro_step", pa.int32(), "passes", "forward/backward pass within the step, from 0"),
    Column("seq", pa.int64(), "", "order in which this process saw it, over the run"),
    Column("time", pa.timestamp("us", tz="UTC"), "UTC", "wall clock of the step's end"),
    Column("phase", _NAME, "", ", ".join(PHASES)),
    Column(
        "module",
        _NAME,
        "",
        "fully-qualified name as in state_dict; '' the root; NULL outside any module",
    ),
    Column("call", pa.int32(), "calls", "nth call of that module in the micro step, from 0"),
    Column(
        "tensor",
        _NAME,
        "",
        f"{', '.join(TENSORS)}; for an event its name: {', '.join(EVENTS)}",
    ),
    Column("path", _NAME, "", "where in arguments or outputs: 0, hidden_states, past.0.1, weight"),
    Column("dtype", _NAME, "", "torch's name of the element type: float32, bfloat16, complex64"),
    Column("shape", _NAME, "elements", "shape as torch prints it: [8, 128, 256]"),
    Column("device", _NAME, "", "torch's name of the device: cpu, cuda:0"),
    Column("numel", pa.int64(), "elements", "number of elements"),
    Column("nan_count", pa.int64(), "elements", "elements that are NaN"),
    Column("posinf_count", pa.int64(), "elements", "elements that are +Inf"),
    Column("neginf_count", pa.int64(), "elements", "elements that are -Inf"),
    Column("min", pa.float64(), "", "smallest finite element; NULL when there is none"),
    Column("max", pa.float64(), "", "largest finite element; NULL when there is none"),
    Column("norm", pa.float64(), "", "L2 norm of the finite elements; NULL when there is none"),
    Column("op", _NAME, "", "operation of an op-level or replay record, else NULL"),
    Column("file", _NAME, "", "source file of an op-level or replay record, else NULL"),
    Column("line", pa.int32(), "", "line in that file, from 1, else NULL"),
    Column("detail", _NAME, "", "what an event says in words, of a replay as JSON, else NULL"),
)
COLUMN_NAMES = tuple(column.name for column in COLUMNS)
ARROW_SCHEMA = pa.schema([(column.name, column.type) for column in COLUMNS])


class Record(NamedTuple):
    """One row of the trace, as ``COLUMNS`` describes it; ``None`` is NULL."""

    step: int
    seq: int
    phase: str
    tensor: str
    module: str | None = None
    path: str = ""
    call: int | None = None
    micro_step: int = 0
    rank: int = 0
    time: datetime | None = None
    dtype: str | None = None
    shape: str | None = None
    device: str | None = None
    numel: int | None = None
    nan_count: int | None = None
    posinf_count: int | None = None
    neginf_count: int | None = None
    min: float | None = None
    max: float | None = None
    norm: float | None = None
    op: str | None = None
    file: str | None = None
    line: int | None = None
    detail: str | None = None

    @property
    def nonfinite_count(self) -> int:
        """Number of elements that are NaN, +Inf or -Inf."""
        return (self.nan_count or 0) + (self.posinf_count or 0) + (self.neginf_count or 0)


def batch_of_records(records: Iterable[Record]) -> pa.RecordBatch:
    """Return the records as one Arrow batch with ``ARROW_SCHEMA``."""
    rows = list(records)
    return batch_of_columns({name: [getattr(row, name) for row in rows] for name in COLUMN_NAMES})


def batch_of_columns(columns: dict[str, list[Any]]) -> pa.RecordBatch:
    """Return columns of equal length as one Arrow batch with ``ARROW_SCHEMA``.

    ``columns`` maps every name in ``COLUMN_NAMES`` to a list of Python values (``None`` is NULL) or to an
    Arrow array of the column's own type.
    """
    arrays = [_array(columns[column.name], column.type) for column in COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def _array(values: list[Any] | pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_dictionary(kind):
        words: pa.Array[Any] = pa.array(values, kind.value_type)
        return words.dictionary_encode()
    array: pa.Array[Any] = pa.array(values, kind)
    return array
