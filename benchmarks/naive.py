"""What one writes first: hooks on every module, six statistics of every tensor, a list of rows as Parquet.

It is here to be compared with, so it is written straightforwardly and nothing in it is made fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from benchmarks.models import Training


class Naive:
    """Records a training to ``path`` between ``__enter__`` and ``__exit__``, a row group a step."""

    def __init__(self, training: Training, path: Path) -> None:
        self._training = training
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._writer: pq.ParquetWriter | None = None
        self._step = 0

    def __enter__(self) -> Naive:
        for name, module in self._training.model.named_modules():
            self._handles += self._watch(name, module)
        optimizer = self._training.optimizer
        self._handles.append(optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(optimizer.register_step_post_hook(self._after_update))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._writer is not None:
            self._writer.close()

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def forward(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self._add_all(name, "input", inputs)
            self._add_all(name, "output", outputs)

        def backward(_: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
            self._add_all(name, "grad_output", grad_outputs)
            self._add_all(name, "grad_input", grad_inputs)

        return [module.register_forward_hook(forward), module.register_full_backward_hook(backward)]

    def _add_all(self, name: str, what: str, values: Any) -> None:
        if isinstance(values, Tensor):
            self._add(name, what, values)
        elif isinstance(values, (tuple, list)):
            for value in values:
                self._add_all(name, what, value)

    def _add(self, name: str, what: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            row = {"step": self._step, "name": name, "tensor": what, "shape": str(list(tensor.shape))}
            self._rows.append(row | statistics_of(tensor.detach()))

    def _before_update(self, *_: Any) -> None:
        for name, parameter in self._training.model.named_parameters():
            if parameter.grad is not None:
                self._add(name, "grad", parameter.grad)

    def _after_update(self, *_: Any) -> None:
        for name, parameter in self._training.model.named_parameters():
            self._add(name, "param", parameter)
        table = pa.Table.from_pylist(self._rows)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
        self._rows = []
        self._step += 1


def statistics_of(tensor: Tensor) -> dict[str, float | None]:
    """Return counts of NaN, +Inf and -Inf, and smallest, largest and norm of the finite elements."""
    finite = tensor[torch.isfinite(tensor)]
    some = finite.numel() > 0
    return {
        "nan": torch.isnan(tensor).sum().item(),
        "posinf": torch.isposinf(tensor).sum().item(),
        "neginf": torch.isneginf(tensor).sum().item(),
        "min": finite.min().item() if some else None,
        "max": finite.max().item() if some else None,
        "norm": finite.norm().item() if some else None,
    }
