"""The columns of a trace: their names, types, units and meaning, and the history of their version.

One row is one record: one tensor seen at one boundary. Everything that writes or reads a trace takes the
columns from here; the documentation and ``gradtrace sql --schema`` are made from the same table. Plain data, so
that a reader may do without pyarrow; what Arrow makes of it is in ``arrow.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

SCHEMA_VERSION = 1
# 1  first version

LARGE_FOOTERS: Mapping[str, Any] = {"thrift_string_size_limit": 2**31 - 1, "thrift_container_size_limit": 2**31 - 1}
"""How to open a Parquet file with Arrow: the facts of a run with half a million modules are beyond its own limits."""

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
    "grad_norm",
)
EVENTS = ("skip", "incident", "replay", "switch", "stop", "lost")

Type = Literal["int32", "int64", "double", "string", "timestamp[us, tz=UTC]"]
"""Arrow's own name of a column's type; every string column is dictionary-encoded."""


class Column(NamedTuple):
    """One column of the trace: its type, the unit of its values and what they mean."""

    name: str
    type: Type
    unit: str
    meaning: str


COLUMNS = (
    Column("rank", "int32", "", "process number, 0 without torch.distributed"),
    Column("step", "int64", "steps", "optimizer step, from 0 (or from --first-step)"),
    Column("micro_step", "int32", "passes", "forward/backward pass within the step, from 0"),
    Column("seq", "int64", "", "order in which this process saw it, over the run"),
    Column("time", "timestamp[us, tz=UTC]", "UTC", "wall clock of the step's end"),
    Column("phase", "string", "", ", ".join(PHASES)),
    Column(
        "module",
        "string",
        "",
        "fully-qualified name as in state_dict; '' the root; NULL outside any module",
    ),
    Column("call", "int32", "calls", "nth call of that module in the micro step, from 0"),
    Column(
        "tensor",
        "string",
        "",
        f"{', '.join(TENSORS)}; for an event its name: {', '.join(EVENTS)}",
    ),
    Column("path", "string", "", "where in arguments or outputs: 0, hidden_states, past.0.1, weight"),
    Column("dtype", "string", "", "torch's name of the element type: float32, bfloat16, complex64"),
    Column("shape", "string", "elements", "shape as torch prints it: [8, 128, 256]"),
    Column("device", "string", "", "torch's name of the device: cpu, cuda:0"),
    Column("numel", "int64", "elements", "number of elements"),
    Column("nan_count", "int64", "elements", "elements that are NaN"),
    Column("posinf_count", "int64", "elements", "elements that are +Inf"),
    Column("neginf_count", "int64", "elements", "elements that are -Inf"),
    Column("min", "double", "", "smallest finite element; NULL when there is none"),
    Column("max", "double", "", "largest finite element; NULL when there is none"),
    Column("norm", "double", "", "L2 norm of the finite elements; NULL when there is none"),
    Column("op", "string", "", "operation of an op-level or replay record, else NULL"),
    Column("file", "string", "", "source file of an op-level or replay record, else NULL"),
    Column("line", "int32", "", "line in that file, from 1, else NULL"),
    Column("detail", "string", "", "what an event says in words, a replay as JSON; a remark; else NULL"),
)
COLUMN_NAMES = tuple(column.name for column in COLUMNS)


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
