"""Parameters, buffers and gradients: when they are recorded, with which numbers, and whom nobody keeps alive."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
from capture.tracing import Recorded, assert_holds, record
from torch import Tensor, nn

import gradtrace
from gradtrace.capture.tracer import Tracer
from gradtrace.trace.incident import DETACHED


def make_model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *more, nn.Linear(4, 2))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


def own(recorded: Recorded, tensor: str, phase: str) -> list[tuple[object, ...]]:
    return recorded.columns("step", "module", "path", tensor=tensor, phase=phase)


def test_states_are_recorded_once_before_and_after_each_step(tmp_path: Path) -> None:
    model = make_model(nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states: list[dict[str, Tensor]] = []

    def train() -> None:
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            states.append({name: value.clone() for name, value in model.state_dict().items()})

    recorded = record(model, tmp_path, train)
    floating = [name for name, value in states[0].items() if value.is_floating_point()]
    assert len(floating) == 8
    for moment, (step, phase) in enumerate([(0, "input"), (0, "optimizer"), (1, "optimizer")]):
        rows = [r for r in recorded.where(step=step, phase=phase) if r["tensor"] in ("param", "buffer")]
        assert [f"{r['module']}.{r['path']}" for r in rows] == floating
        for row, name in zip(rows, floating, strict=True):
            assert row["tensor"] == ("buffer" if "running" in name else "param")
            assert_holds(row, states[moment][name])


def test_each_micro_steps_own_gradient_is_recorded_not_the_sum(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for micro in range(3):
        loss = model(batch(micro)).square().mean()
        expected.append(torch.autograd.grad(loss, model[0].weight)[0])

    def train() -> None:
        for micro in range(3):
            model(batch(micro)).square().mean().backward()
        optimizer.step()

    recorded = record(model, tmp_path, train)
    rows = recorded.where(tensor="grad", module="0", path="weight", phase="backward")
    assert [row["micro_step"] for row in rows] == [0, 1, 2]
    for row, gradient in zip(rows, expected, strict=True):
        assert_holds(row, gradient)
    assert recorded.where(tensor="grad", phase="optimizer") == []


def test_a_gradient_that_a_users_hook_cleans_is_seen_clean(tmp_path: Path) -> None:
    model = make_model()
    model[0].bias.register_hook(lambda gradient: torch.full_like(gradient, 2.0))
    recorded = record(model, tmp_path, lambda: (model(batch()) * math.nan).mean().backward())
    cleaned = recorded.only(tensor="grad", module="0", path="bias")
    assert (cleaned["nan_count"], cleaned["min"], cleaned["max"], cleaned["norm"]) == (0, 2.0, 2.0, 4.0)
    assert recorded.only(tensor="grad", module="0", path="weight")["nan_count"] == 12


def test_a_gradient_that_is_gone_after_backward_has_been_seen(tmp_path: Path) -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    recorded = record(model, tmp_path, lambda: model(batch()).mean().backward())
    assert {(m, p) for _, m, p in own(recorded, "grad", "backward")} == {
        (m, p) for m in ("0", "1") for p in ("bias", "weight")
    }


def test_one_nan_that_clipping_spreads_is_told_from_those_it_reached(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].bias.register_hook(lambda gradient: gradient * math.nan)

    def train() -> None:
        model(batch()).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    recorded = record(model, tmp_path, train)
    arrived = {(r["module"], r["path"]): r["nan_count"] for r in recorded.where(tensor="grad", phase="backward")}
    assert arrived == {("0", "weight"): 0, ("0", "bias"): 4, ("1", "weight"): 0, ("1", "bias"): 0}
    final = recorded.columns("module", "path", "nan_count", "numel", tensor="grad", phase="optimizer")
    assert final == [("0", "weight", 12, 12), ("1", "weight", 8, 8), ("1", "bias", 2, 2)]
    rates = recorded.only(tensor="lr")
    assert all(row["seq"] > rates["seq"] for row in recorded.where(tensor="grad", phase="optimizer"))


def test_a_gradient_that_the_script_cleans_is_recorded_clean_before_the_step(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        (model(batch()) * math.inf).mean().backward()
        for parameter in model.parameters():
            torch.nan_to_num_(parameter.grad, 0.0, 1.0, -1.0)
        optimizer.step()

    recorded = record(model, tmp_path, train)
    final = recorded.where(tensor="grad", phase="optimizer")
    assert len(final) == 4
    for row in final:
        assert (row["nan_count"], row["posinf_count"], row["neginf_count"]) == (0, 0, 0)


def test_sparse_gradients_are_recorded_by_their_values(tmp_path: Path) -> None:
    table = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)

    def train() -> None:
        for scale in (3.0, math.nan):
            optimizer.zero_grad()
            (table(torch.tensor([1, 7, 1])) * scale).sum().backward()
            optimizer.step()

    recorded = record(table, tmp_path, train)
    first, second = recorded.where(tensor="grad")
    assert (first["shape"], first["numel"], first["min"], first["max"]) == ("[10, 2]", 6, 3.0, 3.0)
    assert (second["numel"], second["nan_count"]) == (6, 6)
    assert recorded.columns("step", "nan_count", tensor="param") == [(0, 0), (0, 0), (1, 4)]


def test_a_tied_weight_is_one_parameter_under_its_first_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.embed(index))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.autograd.grad(model(torch.tensor([1, 2])).square().mean(), model.embed.weight)[0]

    def train() -> None:
        model(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()

    recorded = record(model, tmp_path, train)
    assert own(recorded, "param", "input") == own(recorded, "param", "optimizer") == [(0, "embed", "weight")]
    row = recorded.only(tensor="grad")
    assert (row["module"], row["path"]) == ("embed", "weight")
    assert_holds(row, expected)


def test_a_parametrized_weight_goes_by_the_name_of_its_original(tmp_path: Path) -> None:
    model = make_model()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    recorded = record(model, tmp_path, lambda: model(batch()).mean().backward())
    expected = {name.rpartition(".")[::2] for name in model.state_dict()}
    assert {(m, p) for _, m, p in own(recorded, "grad", "backward")} == expected
    assert {(m, p) for _, m, p in own(recorded, "param", "input")} == expected


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_the_gradients_of_a_lazy_module_are_seen_from_the_first_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    assert recorded.columns("step", "shape", tensor="grad", module="0", path="weight") == [(0, "[4, 3]"), (1, "[4, 3]")]
    assert recorded.columns("step", tensor="param", module="0", path="weight") == [(0,), (1,)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_seen_after_the_model_has_changed_its_type(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            if step == 1:
                model.to(dtype)
                optimizer.zero_grad()
            model(batch().to(model[0].weight.dtype)).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    name = str(dtype).removeprefix("torch.")
    rows = recorded.columns("step", "dtype", tensor="grad", module="0", path="weight")
    assert rows == [(0, "float32"), (1, name), (2, name)]


def test_a_parameter_that_is_given_another_shape_goes_on_training(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            if step == 1:  # the layer grows, as when tokens are added to a vocabulary
                model[1].weight.data = torch.cat([model[1].weight.data, torch.ones(1, 4)])
                model[1].bias.data = torch.ones(3)
            optimizer.zero_grad()
            model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    assert recorded.info.end == "completed"
    rows = recorded.columns("step", "shape", tensor="grad", module="1", path="weight")
    assert rows == [(0, "[2, 4]"), (1, "[3, 4]"), (2, "[3, 4]")]


def test_a_parameter_that_is_put_in_the_place_of_another_is_recorded(tmp_path: Path) -> None:
    model = make_model()

    def train() -> None:
        for step in range(2):
            if step == 1:
                model[0].weight = nn.Parameter(torch.ones(4, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            model(batch()).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 if step == 0 else math.nan)
            optimizer.step()

    recorded = record(model, tmp_path, train)
    assert len(recorded.where(tensor="grad", module="0", path="weight", phase="backward")) == 2
    final = recorded.columns("step", "nan_count", tensor="grad", module="0", path="weight", phase="optimizer")
    assert final == [(1, 12)]
    assert recorded.only(step=1, tensor="param", module="0", path="weight")["nan_count"] == 12


def test_a_gradient_that_was_changed_without_a_trace_is_seen_before_the_step(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(batch()).mean().backward()
            if step == 1:
                version = model[1].bias.grad._version
                model[1].bias.grad.data[0] = math.inf
                assert model[1].bias.grad._version == version
            optimizer.step()

    recorded = record(model, tmp_path, train)
    final = recorded.columns("step", "module", "path", "posinf_count", tensor="grad", phase="optimizer")
    assert final == [(1, "1", "bias", 1)]


def test_a_gradient_that_no_backward_has_brought_is_recorded_before_the_step(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        model(batch())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        model(batch(1)).sum().backward()  # arrives, and is added to what is there
        optimizer.step()

    recorded = record(model, tmp_path, train)
    count = len(list(model.parameters()))
    assert [len(recorded.where(step=0, tensor="grad", phase=phase)) for phase in ("backward", "optimizer")] == [
        0,
        count,
    ]
    assert [len(recorded.where(step=1, tensor="grad", phase=phase)) for phase in ("backward", "optimizer")] == [
        count,
        0,
    ]


def test_frozen_parameters_have_states_but_no_gradients(tmp_path: Path) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    recorded = record(model, tmp_path, lambda: model(batch()).mean().backward())
    assert {m for _, m, _ in own(recorded, "grad", "backward")} == {"1"}
    assert {m for _, m, _ in own(recorded, "param", "input")} == {"0", "1"}
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True]


def test_an_optimizer_of_a_model_that_is_not_traced_changes_nothing(tmp_path: Path) -> None:
    model, stranger = make_model(), make_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (stranger, model)]

    def train() -> None:
        for _ in range(2):
            for m, optimizer in zip((stranger, model), optimizers, strict=True):
                m(batch()).mean().backward()
                optimizer.step()

    recorded = record(model, tmp_path, train)
    assert recorded.info.end == "completed"
    assert {row["step"] for row in recorded.rows} == {0, 1}
    assert len(recorded.where(tensor="output", module="")) == 2
    assert len(recorded.where(tensor="grad", module="0", path="bias")) == 2


def test_a_model_that_the_script_drops_is_freed_at_once(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        with Tracer(None, tmp_path / "run.parquet"):
            model = make_model()
            model(batch()).mean().backward()
            dead = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
            del model
            assert [reference() for reference in dead] == [None] * 5
    finally:
        gc.enable()


def test_a_layer_that_the_script_drops_is_freed_by_the_next_step(tmp_path: Path) -> None:
    model = make_model(nn.Linear(4, 4))
    gc.collect()
    gc.disable()
    try:
        with Tracer(model, tmp_path / "run.parquet"):
            model(batch()).mean().backward()
            dead = weakref.ref(model[1].weight)
            model[1] = nn.Identity()
            model(batch()).mean().backward()
            assert dead() is None
    finally:
        gc.enable()


def test_nothing_is_left_on_the_parameters(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(batch()).mean().backward()
            optimizer.step()

    before = [(p.requires_grad, p.is_leaf, dict(p.__dict__)) for p in model.parameters()]
    recorded = record(model, tmp_path, train)
    assert [(p.requires_grad, p.is_leaf, dict(p.__dict__)) for p in model.parameters()] == before
    for parameter in model.parameters():
        assert parameter._backward_hooks is None
        assert parameter._post_accumulate_grad_hooks is None
    count = len(recorded.rows)
    model(batch()).mean().backward()  # hooks on nodes that live on would be called now
    assert count == recorded.info.records


def test_state_that_the_script_has_spoiled_is_recorded_before_what_the_module_makes_of_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        model(torch.ones(3, 2)).sum().backward()
        tracer.step()
        with torch.no_grad():
            model[0].bias[1] = float("nan")
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        query = "SELECT module, tensor, path, nan_count FROM records WHERE step = 1 AND phase = 'forward' ORDER BY seq"
        rows = run.execute(query).fetchall()
    first = [
        ("0", "input", "0", 0),
        ("0", "param", "bias", 1),
        ("0", "output", "0", 3),
        ("1", "input", "0", 3),
        ("1", "output", "0", 3),
        ("", "output", "0", 3),
    ]
    assert rows == first + [row for row in first if row[1] in ("input", "output")]


def test_what_a_root_without_weights_returns_without_a_gradient_is_marked(tmp_path: Path) -> None:
    class Recall(nn.Module):
        def forward(self, hits: Tensor, total: Tensor) -> Tensor:
            return hits / total

    model, recall = nn.Linear(2, 1), Recall()
    with Tracer(path=tmp_path / "run.parquet"):
        y = model(torch.ones(1, 2))
        recall(y.detach() * 0, torch.zeros(1))
        recall(y, torch.ones(1)).sum().backward()
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        assert run.info.incidents == 0
        query = "SELECT module, detail FROM records WHERE tensor = 'output' ORDER BY seq"
        assert run.execute(query).fetchall() == [("", None), ("recall", DETACHED), ("recall", None)]
