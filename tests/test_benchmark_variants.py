"""Every variant of the cost benchmarks watches a training without changing it, and the floor reads each tensor once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from small_training import small_training
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.floor import Floor
from benchmarks.models import Training
from benchmarks.naive import statistics_of
from benchmarks.pairs import Side, in_a_line, time_block
from benchmarks.variants import VARIANTS, off


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_a_missing_package_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        VARIANTS["underflow_overflow"](small_training(), Path())
    assert in_a_line(caught.value) == "needs transformers, which is not installed"


def _weights_after(training: Training, side: Side) -> list[Tensor]:
    time_block(training, side._replace(warm_up=2), 10)
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def _hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("floor", "underflow_overflow")])
def test_a_variant_changes_nothing_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    plain = small_training()
    expected = _weights_after(plain, off(plain, tmp_path))
    training = small_training()
    weights = _weights_after(training, VARIANTS[name](training, tmp_path))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected, strict=True))
    assert _hooks(training.model) == 0
    assert not torch.is_anomaly_enabled()


def test_full_capture_records_every_step_of_a_block_and_every10_each_tenth_in_full(tmp_path: Path) -> None:
    for name, outputs in (("full", 12), ("every10", 2)):
        training = small_training()
        _weights_after(training, VARIANTS[name](training, tmp_path))
        run = pq.read_table(tmp_path / "run.parquet", columns=["module", "tensor"]).to_pylist()
        assert run.count({"module": "1", "tensor": "output"}) == outputs


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_naive_recording_has_a_row_for_every_tensor(tmp_path: Path) -> None:
    training = small_training()
    _weights_after(training, VARIANTS["naive"](training, tmp_path))
    rows = pq.read_table(tmp_path / "naive.parquet").column("tensor").to_pylist()
    # Four modules with the root; the first layer and the root have a batch without gradient.
    seen = {kind: rows.count(kind) / 12 for kind in sorted(set(rows))}
    assert seen == {"grad": 4, "grad_input": 2, "grad_output": 4, "input": 4, "output": 4, "param": 4}


def test_the_naive_statistics_are_over_the_finite_elements() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0, -4.0])
    assert statistics_of(values) == {"nan": 1, "posinf": 1, "neginf": 1, "min": -4.0, "max": 3.0, "norm": 5.0}
    assert statistics_of(values[:1]) == {"nan": 1, "posinf": 0, "neginf": 0, "min": None, "max": None, "norm": None}


def test_hooks_that_cannot_be_switched_off_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class DebugUnderflowOverflow:
        def __init__(self, model: nn.Module) -> None:
            for module in model.modules():
                module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))

    package, debug_utils = ModuleType("transformers"), ModuleType("transformers.debug_utils")
    debug_utils.DebugUnderflowOverflow = DebugUnderflowOverflow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.debug_utils", debug_utils)
    training = small_training()
    own = training.model[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    with VARIANTS["underflow_overflow"](training, Path()).watch():
        training.step()
    assert seen == ["Linear", "Tanh", "Linear", "Sequential"]
    training.step()
    assert len(seen) == 4 and _hooks(training.model) == 1
    own.remove()


def _all_boundary_norms(training: Training) -> set[float]:
    """Return the norms of all boundary tensors of a step, seen by torch's own hooks; equal tensors count once."""
    norms: set[float] = set()

    def note(*values: Any) -> None:
        for value in values:
            if isinstance(value, tuple):
                note(*value)
            elif isinstance(value, Tensor) and value.is_floating_point():
                norms.add(value.norm().item())

    handles = [
        handle
        for module in training.model.modules()
        for handle in (
            module.register_forward_hook(lambda _, args, result: note(args, result)),
            module.register_full_backward_hook(lambda _, grads, more: note(grads, more)),
        )
    ]
    training.loss().backward()  # type: ignore[no-untyped-call]
    note(*(parameter.grad for parameter in training.model.parameters()))
    training.optimizer.step()
    training.optimizer.zero_grad()
    note(*training.model.parameters())
    for handle in handles:
        handle.remove()
    return norms


def _residual() -> Training:
    model = nn.Sequential(nn.Linear(3, 4), _Residual(), nn.Flatten(), nn.Linear(4, 2))
    inputs, targets = torch.randn(5, 3), torch.randn(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, lambda: F.mse_loss(model(inputs), targets))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("make", "count"),
    [
        # Batch and three outputs; the gradients of the three outputs; four parameters, with gradients.
        (small_training, 4 + 3 + 8),
        # Batch and four outputs (Flatten's is its input again). The gradients of the last layer's output and input; of
        # the inner layer's input, to which the residual adds one; the sum. Six parameters, with gradients.
        (_residual, 5 + 4 + 12),
    ],
)
def test_the_floor_reads_each_distinct_tensor_once(make: Callable[[], Training], count: int) -> None:
    torch.manual_seed(0)
    training = make()
    read: list[float] = []
    floor = Floor(training, lambda tensor: read.append(tensor.norm().item()))
    assert read == []
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    with floor.reading():
        training.step()
    assert len(read) == len(set(read)) == count
    training.model.load_state_dict(before)
    assert set(read) == _all_boundary_norms(training)
    assert _hooks(training.model) == 0


def test_the_floor_changes_nothing_and_reads_no_more_when_it_ends() -> None:
    plain, training = small_training(), small_training()
    plain.step()
    read: list[Tensor] = []
    floor = Floor(training, read.append)
    expected = _weights_after(plain, off(plain, Path()))
    weights = _weights_after(training, Side(floor.reading))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected, strict=True))
    count = len(read)
    training.step()
    assert len(read) == count == 12 * 15
