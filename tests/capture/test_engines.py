"""The engine ``graph`` held against torch's own hooks: the engine ``hooks``, and hooks written here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradtrace.errors import CaptureError, GradtraceWarning
from tests.capture.tracing import Recorded, Row, assert_holds, assert_same_rows, record

# torch's own words about modules whose inputs need no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

Output = Tensor | tuple[Tensor, ...]


class Attention(nn.Module):
    """Self-attention of two heads, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        weights = functional.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    """Two branches of very different slope that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.small(x) + 100 * self.large(x)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, dim=-1)


class Unbound(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(dim=1)


class Split(nn.Module):
    """Modules whose outputs are pieces of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.halves, self.unbound = nn.Linear(4, 6), Halves(), Unbound()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.halves(self.first(x))
        one, two, three = self.unbound(left.unsqueeze(-1).expand(-1, -1, 2) * 2)
        return one + 2 * two * three, right.tanh()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(x)


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Mixed(nn.Module):
    """Takes several tensors, gives several back, and does not need all of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) * mask, self.b(y) - x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed, self.last = nn.Linear(4, 4), Mixed(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        one, two = self.mixed(hidden, hidden * 2, x > 0)
        return self.last(one + two)


class Recurrent(nn.Module):
    """An LSTM of which only the sequence is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(4, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence, _ = self.lstm(self.embed(x))
        return self.head(sequence)


def cnn() -> nn.Module:
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), (5, 4)),
    "cnn": (cnn, (4, 1, 8, 8)),
    "transformer": (lambda: nn.Sequential(Block(8), Block(8), nn.LayerNorm(8)), (2, 5, 8)),
    "residual": (lambda: nn.Sequential(nn.Linear(4, 4), Residual(), nn.Linear(4, 2)), (5, 4)),
    "split": (Split, (5, 4)),
    "function": (lambda: nn.Sequential(nn.Linear(4, 4), Cube(), nn.Linear(4, 2)), (5, 4)),
    "shared": (Twice, (5, 4)),
    "nested": (Nested, (5, 4)),
    "recurrent": (Recurrent, (2, 6, 4)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make(), torch.randn(shape)


def loss_of(output: Output) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((o.square().mean() for o in outputs), torch.zeros(()))


def train(model: nn.Module, batch: Tensor, steps: int = 2) -> Callable[[], None]:
    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()

    return run


def trained(name: str, path: Path, **options: Any) -> Recorded:
    model, batch = build(name)
    return record(model, path, train(model, batch), **options)


def seen_by_hooks(rows: list[Row]) -> list[Row]:
    """Leave out what full backward hooks do not see: the tensors inside of a nested result."""
    return [row for row in rows if row["phase"] != "backward" or row["tensor"] == "grad" or "." not in row["path"]]


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_record_the_same_rows(name: str, tmp_path: Path) -> None:
    graph = trained(name, tmp_path, engine="graph")
    hooks = trained(name, tmp_path, engine="hooks")
    assert {row["tensor"] for row in hooks.rows} >= {"input", "output", "grad_output", "grad_input", "grad", "param"}
    assert_same_rows(seen_by_hooks(graph.rows), hooks.rows)


def raw_gradients(model: nn.Module, batch: Tensor) -> dict[tuple[str, str, str], list[Tensor]]:
    """Return what hooks registered by hand see in one pass, by (module, tensor, path), in the order of arrival."""
    seen: dict[tuple[str, str, str], list[Tensor]] = {}

    def keep(name: str, kind: str, gradients: Any) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_floating_point():  # of a mask there is one too, of zeros
                seen.setdefault((name, kind, str(index)), []).append(gradient.clone())

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def both(module: nn.Module, inputs: Any, outputs: Any) -> None:
            keep(name, "grad_output", outputs)
            keep(name, "grad_input", inputs)

        return both

    handles = [module.register_full_backward_hook(hook(name)) for name, module in model.named_modules()]
    loss_of(model(batch)).backward()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_full_backward_hooks(name: str, tmp_path: Path) -> None:
    model, batch = build(name)
    expected = raw_gradients(model, batch)
    model, batch = build(name)
    recorded = record(model, tmp_path, train(model, batch, steps=1))
    rows: dict[tuple[str, str, str], list[Row]] = {}
    for row in seen_by_hooks(recorded.rows):
        if row["tensor"] in ("grad_output", "grad_input"):
            rows.setdefault((row["module"], row["tensor"], row["path"]), []).append(row)
    assert rows.keys() == expected.keys()
    for place, gradients in expected.items():
        for row, gradient in zip(rows[place], gradients, strict=True):
            assert_holds(row, gradient)


def test_each_branch_of_a_residual_contributes_its_own_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Residual())
    batch = torch.randn(3, 4)
    recorded = record(model, tmp_path, lambda: model(batch).sum().backward())
    arriving = torch.ones(3, 4)
    small = 0.01 * arriving @ model[1].small.weight
    large = 100 * arriving @ model[1].large.weight
    assert_holds(recorded.only(module="1.small", tensor="grad_input"), small)
    assert_holds(recorded.only(module="1.large", tensor="grad_input"), large)
    assert_holds(recorded.only(module="1", tensor="grad_input"), arriving + small + large)
    assert_holds(recorded.only(module="0", tensor="grad_output"), arriving + small + large)


@pytest.mark.parametrize("engine", ["graph", "hooks"])
def test_models_that_nobody_named_are_found_and_seen_once(engine: str, tmp_path: Path) -> None:
    def run() -> None:
        model, batch = build("mlp")
        criterion = nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            criterion(model(batch), torch.zeros(5, 2)).backward()
            optimizer.step()

    found = record(None, tmp_path, run, engine=engine)
    assert [info.calls for info in found.info.modules] == [2] * len(found.info.modules)
    assert {info.name for info in found.info.modules} == {"", "0", "1", "2", "3", "4", "criterion"}
    for module in ("", "0", "1", "2", "3", "4", "criterion"):
        rows = found.columns("step", "call", module=module, tensor="output")
        assert rows == [(0, 0), (1, 0)], module
        rows = found.columns("step", "call", module=module, tensor="grad_output")
        assert rows == [(0, 0), (1, 0)], module
    assert found.columns("step", "path", phase="input", module="", tensor="input") == [(0, "0"), (1, "0")]


def test_both_engines_find_the_same(tmp_path: Path) -> None:
    def run() -> None:
        train(*build("transformer"))()

    assert_same_rows(record(None, tmp_path, run, engine="graph").rows, record(None, tmp_path, run, engine="hooks").rows)


def test_hooks_tell_the_calls_of_a_pass_over_a_kept_graph(tmp_path: Path) -> None:
    def run(model: nn.Module) -> Callable[[], None]:
        def passes() -> None:
            loss = loss_of(model(torch.ones(2, 4)))
            loss.backward(retain_graph=True)
            loss.backward()

        return passes

    torch.manual_seed(0)
    graph_model, hooks_model = Twice(), Twice()
    hooks_model.load_state_dict(graph_model.state_dict())
    graph = record(graph_model, tmp_path, run(graph_model), engine="graph")
    hooks = record(hooks_model, tmp_path, run(hooks_model), engine="hooks")
    assert len(graph.where(module="layer", tensor="grad_output", call=1, detail="pass 2")) == 1
    assert_same_rows(graph.rows, hooks.rows)


def test_hooks_see_modules_that_are_added_during_the_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def run() -> None:
        model(torch.ones(2, 4)).sum().backward()
        model.append(nn.Linear(4, 3))
        model(torch.ones(2, 4)).sum().backward()

    recorded = record(model, tmp_path, run, engine="hooks")
    assert len(recorded.where(module="1", tensor="output")) == 1
    assert len(recorded.where(module="1", tensor="grad_output")) == 1


def test_hooks_refuse_a_model_that_works_in_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with pytest.raises(CaptureError, match=r"cannot bear 1 \(ReLU with inplace=True\); use the engine graph"):
        record(model, tmp_path, lambda: None, engine="hooks")
    assert not list(tmp_path.iterdir())
    assert not model[0]._forward_hooks and not model[0]._backward_hooks


def test_hooks_leave_out_backward_where_a_model_that_is_found_works_in_place(tmp_path: Path) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        train(model, torch.ones(2, 4))()

    with pytest.warns(GradtraceWarning, match="cannot bear 1 .*its backward boundaries are not recorded") as caught:
        recorded = record(None, tmp_path, run, engine="hooks")
    assert len(caught) == 1
    assert recorded.info.end == "completed"
    assert len(recorded.where(module="1", tensor="output")) == 2
    assert not [row for row in recorded.rows if row["tensor"] in ("grad_output", "grad_input")]
    assert len(recorded.where(module="0", tensor="grad", path="weight")) == 2
    assert recorded.info.unmeasured == {"model without backward boundaries: a module works in place": 1}


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out += x
        return out


def test_hooks_say_whose_fault_it_is_when_torch_refuses_an_in_place_addition(tmp_path: Path) -> None:
    model = AddsInPlace()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="BackwardHookFunction"):
            record(model, tmp_path, train(model, torch.ones(2, 4)), engine="hooks")
    messages = [str(w.message) for w in caught if issubclass(w.category, GradtraceWarning)]
    assert len(messages) == 1
    assert "engine='hooks'" in messages[0] and "engine='graph' can" in messages[0]
    recorded = record(model, tmp_path, train(model, torch.ones(2, 4)), engine="graph")
    assert len(recorded.where(module="layer", tensor="grad_input")) == 0  # the batch needs no gradient
    assert len(recorded.where(module="layer", tensor="grad_output")) == 2


@pytest.mark.parametrize("engine", ["graph", "hooks"])
def test_no_hook_is_left_behind(engine: str, tmp_path: Path) -> None:
    call = nn.Module.__call__
    run_backward = torch.autograd._engine_run_backward
    model, batch = build("mlp")
    record(model, tmp_path, train(model, batch), engine=engine)
    assert nn.Module.__call__ is call
    assert torch.autograd._engine_run_backward is run_backward
    for module in model.modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        assert not any(getattr(module, kind) for kind in kinds)


def test_only_hooks_report_a_gradient_for_a_float_that_needs_none(tmp_path: Path) -> None:
    """Full backward hooks make every float that enters along with one that needs a gradient need one too."""

    def run(model: nn.Module) -> Callable[[], None]:
        mask = torch.tensor([0.0, 1.0])
        return lambda: loss_of(model(torch.ones(2, 4, requires_grad=True), torch.ones(2, 4), mask[:, None])).backward()

    paths = {}
    for engine in ("graph", "hooks"):
        model = Mixed()
        recorded = record(model, tmp_path, run(model), engine=engine)
        paths[engine] = [path for (path,) in recorded.columns("path", module="", tensor="grad_input")]
    assert paths == {"graph": ["0"], "hooks": ["0", "1", "2"]}


def test_hooks_follow_a_criterion_that_is_made_anew_in_each_step(tmp_path: Path) -> None:
    def run() -> None:
        model, batch = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            nn.MSELoss()(model(batch), torch.zeros(5, 2)).backward()
            optimizer.step()

    recorded = record(None, tmp_path, run, engine="hooks")
    assert recorded.columns("step", "call", module="MSELoss", tensor="output") == [(0, 0), (1, 0), (2, 0)]
    assert recorded.columns("step", "call", module="MSELoss", tensor="grad_output") == [(0, 0), (1, 0), (2, 0)]
