"""Rows for tests of the verdict, in the order in which a recording would hold them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtrace.analysis.run import Run, open_run
from gradtrace.trace.confirmation import Boundary, Confirmation, OpDetail, SourceLine, Status
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record
from tests.traces import write_run

NAN: dict[str, Any] = {"nan_count": 1}
INF: dict[str, Any] = {"posinf_count": 1}
NEGINF: dict[str, Any] = {"neginf_count": 1}
ALL_NAN: dict[str, Any] = {"nan_count": 8, "min": None, "max": None, "norm": None}
_NOTHING: dict[str, Any] = dict.fromkeys(
    ("dtype", "shape", "numel", "nan_count", "posinf_count", "neginf_count", "min", "max", "norm")
)


class Rows:
    """Collects records; ``seq`` counts up, a tensor is eight finite float32 unless said otherwise."""

    def __init__(self, rank: int = 0, micro_step: int = 0) -> None:
        self.records: list[Record] = []
        self.rank = rank
        self.micro_step = micro_step
        self.step = 0
        self._seq = itertools.count()

    def add(self, phase: str, module: str | None, tensor: str, path: str = "0", **values: Any) -> Record:
        seq = next(self._seq)
        defaults: dict[str, Any] = {
            "call": 0 if tensor in ("input", "output", "grad_output", "grad_input") else None,
            "dtype": "float32",
            "shape": "[8]",
            "numel": 8,
            "nan_count": 0,
            "posinf_count": 0,
            "neginf_count": 0,
            "min": -1.0 - seq,  # no two tensors of a test are the same by accident
            "max": 1.0 + seq,
            "norm": 2.0 + seq,
        }
        record = Record(
            step=self.step,
            seq=seq,
            phase=phase,
            tensor=tensor,
            module=module,
            path=path,
            rank=self.rank,
            **({"micro_step": self.micro_step} | defaults | values),
        )
        self.records.append(record)
        return record

    def again(self, phase: str, module: str | None, tensor: str, path: str, like: Record) -> Record:
        """Add the tensor of another record at one more boundary."""
        names = ("dtype", "shape", "numel", "nan_count", "posinf_count", "neginf_count", "min", "max", "norm")
        return self.add(phase, module, tensor, path, **{name: getattr(like, name) for name in names})

    def scalar(self, phase: str, tensor: str, value: float | None, path: str = "", **counts: int) -> Record:
        """Add a loss, a learning rate or a loss scale; None is one that is not finite."""
        return self.add(phase, None, tensor, path, shape="[]", numel=1, min=value, max=value, norm=value, **counts)

    def skip(self) -> None:
        """Add the event of a step that GradScaler skipped."""
        self.add("event", None, "skip", "", detail="GradScaler skipped the optimizer step", **_NOTHING)

    def birth(
        self,
        op: str,
        module: str | None,
        tensor: str = "output",
        made: dict[str, Any] = NAN,
        *,
        operands: Sequence[tuple[str, str, dict[str, Any]]] = (),
        traceback: Sequence[SourceLine] = (),
        flows_to: Sequence[Boundary] = (),
        fill: bool = False,
        **values: Any,
    ) -> Record:
        """Add what a replay writes of one operation: its operands (tensor, path, values), then its result."""
        line = traceback[-1] if traceback else None
        place = {
            "op": op,
            "call": None if module is None else 0,
            "file": line.file if line else None,
            "line": line.line if line else None,
        }
        for kind, path, given in operands:
            self.add("replay", module, kind, path, **(place | given))
        detail = OpDetail(tuple(traceback), tuple(flows_to), fill).to_json()
        return self.add("replay", module, tensor, "0", **(place | {"detail": detail} | made | values))

    def replay(self, status: Status = "reproduced", reason: str | None = None, **said: Any) -> Record:
        """Add the event that says how a replay went."""
        detail = Confirmation(status, reason, **said).to_json()
        return self.add("event", None, "replay", "", detail=detail, **_NOTHING)

    def start(self, *state: tuple[str, str, str], **values: Any) -> None:
        """Add parameters and buffers as they are before the first step: (module, tensor, path)."""
        for module, tensor, path in state:
            self.add("input", module, tensor, path, **values)


PARAMS = (("fc1", "weight"), ("fc2", "weight"))
MODULES = [
    ModuleInfo("", "Net", root=True, file="train.py", line=9),
    ModuleInfo("fc1", "Linear", depth=1, parameters={"weight": "[4, 2]"}, calls=1),
    ModuleInfo("act", "ReLU", depth=1, calls=1),
    ModuleInfo("fc2", "Linear", depth=1, parameters={"weight": "[2, 4]"}, calls=1),
]


def forward(rows: Rows, until: str | None = None, **bad: dict[str, Any]) -> None:
    """Add the forward pass of root(fc1, act, fc2).

    ``bad`` gives values to boundaries by name: batch, fc1_in, fc1, act_in, act, fc2_in, fc2, out.
    """
    rows.add("input", "", "input", **bad.get("batch", {}))
    for name in ("fc1", "act", "fc2"):
        rows.add("forward", name, "input", **bad.get(f"{name}_in", {}))
        rows.add("forward", name, "output", **bad.get(name, {}))
    rows.add("forward", "", "output", **bad.get("out", {}))


def backward(rows: Rows, loss: float | None = 1.0, loss_counts: dict[str, int] | None = None, **bad: Any) -> None:
    """Add the loss and the backward pass.

    ``bad`` names out, fc2, fc2_in, fc2_grad, act, act_in, fc1, fc1_grad: grad_output, grad_input, grad.
    """
    rows.scalar("loss", "loss", loss, **(loss_counts or {}))
    rows.add("backward", "", "grad_output", **bad.get("out", {}))
    rows.add("backward", "fc2", "grad_output", **bad.get("fc2", {}))
    rows.add("backward", "fc2", "grad_input", **bad.get("fc2_in", {}))
    rows.add("backward", "fc2", "grad", "weight", **bad.get("fc2_grad", {}))
    rows.add("backward", "act", "grad_output", **bad.get("act", {}))
    rows.add("backward", "act", "grad_input", **bad.get("act_in", {}))
    rows.add("backward", "fc1", "grad_output", **bad.get("fc1", {}))
    rows.add("backward", "fc1", "grad", "weight", **bad.get("fc1_grad", {}))


def update(rows: Rows, lr: float | None = 0.1, lr_counts: dict[str, int] | None = None, **bad: Any) -> None:
    """Add what is recorded at an optimizer step; ``bad`` names fc1, fc2."""
    rows.scalar("optimizer", "lr", lr, "0.0", **(lr_counts or {}))
    for module, path in PARAMS:
        rows.add("optimizer", module, "param", path, **bad.get(module, {}))


def healthy(rows: Rows, steps: int) -> None:
    """Add ``steps`` healthy steps; the next row belongs to the step after them."""
    for _ in range(steps):
        forward(rows)
        backward(rows)
        update(rows)
        rows.step += 1


def open_rows(tmp_path: Path, rows: Rows, **info: Any) -> Run:
    """Write the rows as a finished run and open it."""
    info = {"modules": MODULES} | info
    return open_run(write_run(tmp_path / "run.parquet", rows.records, **info))
