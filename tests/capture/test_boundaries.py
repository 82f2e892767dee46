"""What is seen at module calls: every kind of argument and result, in the right order, with the right path."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.capture.boundaries import tensors_in_arguments, tensors_in_result
from tests.capture.tracing import Row, assert_holds, record

A, B, C = (torch.full((2,), float(n)) for n in range(3))
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Batch:
    data: Tensor
    extra: Any = None


class ModelOutput(OrderedDict[str, Any]):
    """Like Hugging Face's: a mapping that is read by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Lazy(Mapping[str, Tensor]):
    """A mapping that makes its values when they are asked for."""

    def __getitem__(self, key: str) -> Tensor:
        return {"a": A, "b": B}[key]

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def paths(found: list[tuple[str, Tensor]]) -> list[tuple[str, float]]:
    """Return path and value of each tensor, to tell which is which."""
    return [(path, tensor[0].item()) for path, tensor in found]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (A, [("0", 0)]),
        ((A, B), [("0", 0), ("1", 1)]),
        ([A, None, C], [("0", 0), ("2", 2)]),
        ((A, (B, C)), [("0", 0), ("1.0", 1), ("1.1", 2)]),
        ({"x": A, "y": {"z": B}}, [("x", 0), ("y.z", 1)]),
        ({0: A, ("k", 1): B}, [("0", 0), ("('k', 1)", 1)]),
        (ModelOutput(loss=A, past=((B, C),)), [("loss", 0), ("past.0.0", 1), ("past.0.1", 2)]),
        (Batch(A, {"more": [B]}), [("data", 0), ("extra.more.0", 1)]),
        (Pair(A, B), [("0", 0), ("1", 1)]),
        (Lazy(), [("a", 0), ("b", 1)]),
        ((A, A), [("0", 0), ("1", 0)]),
        ((1, "text", 2.5, True, b"", None, object(), Batch), []),
        (None, []),
    ],
)
def test_results_are_flattened_to_paths(result: Any, expected: list[tuple[str, float]]) -> None:
    assert paths(tensors_in_result(result)) == expected


def test_arguments_are_flattened_to_positions_and_names() -> None:
    found = tensors_in_arguments((A, [B, {"k": C}], None, 3), {"mask": B, "past": (A, (C,)), "flag": True})
    assert paths(found) == [("0", 0), ("1.0", 1), ("1.1.k", 2), ("mask", 1), ("past.0", 0), ("past.1.0", 2)]


def test_containers_that_hold_themselves_end() -> None:
    cycle: dict[str, Any] = {"tensor": A}
    cycle.update({f"self{n}": cycle for n in range(20)})
    assert paths(tensors_in_result(cycle)) == [("tensor", 0)]
    twice = [A]
    assert paths(tensors_in_result((twice, twice))) == [("0.0", 0), ("1.0", 0)]


def test_nesting_beyond_reason_is_not_followed() -> None:
    nested: Any = A
    for _ in range(200):
        nested = (nested,)
    assert tensors_in_result(nested) == []


# In a recording ----------------------------------------------------------------------------------------------


class Child(nn.Module):
    """Takes and gives back nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, pair: tuple[Tensor, list[Tensor]], *, options: dict[str, Tensor]) -> Any:
        first, (second,) = pair
        hidden = first * self.scale + second * options["bias"]
        return {"hidden": hidden, "more": Batch(first - second, [hidden.tanh()])}


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def forward(self, x: Tensor, bias: Tensor) -> ModelOutput:
        out = self.child((x, [x * 2]), options={"bias": bias})
        return ModelOutput(sum=out["hidden"] + out["more"].data, deep=((out["more"].extra[0],),))


def test_nested_arguments_and_results_are_recorded_forward_and_backward(tmp_path: Path) -> None:
    model = Parent()
    x, bias = torch.tensor([[0.5, -1.0]], requires_grad=True), torch.tensor([0.25, 0.75])

    def run() -> None:
        out = model(x, bias=bias)
        (out.sum.sum() + 3 * out.deep[0][0].sum()).backward()

    recorded = record(model, tmp_path, run)
    scale = torch.tensor([2.0, 3.0])
    hidden = x * scale + x * 2 * bias
    expected = {
        ("", "input", "0"): x,
        ("", "input", "bias"): bias,
        ("child", "input", "0.0"): x,
        ("child", "input", "0.1.0"): x * 2,
        ("child", "input", "options.bias"): bias,
        ("child", "output", "hidden"): hidden,
        ("child", "output", "more.data"): x - x * 2,
        ("child", "output", "more.extra.0"): hidden.tanh(),
        ("", "output", "sum"): hidden + x - x * 2,
        ("", "output", "deep.0.0"): hidden.tanh(),
    }
    d_tanh = torch.full((1, 2), 3.0)
    d_hidden = torch.ones(1, 2) + d_tanh * (1 - hidden.tanh() ** 2)
    first, second = d_hidden * scale + 1, d_hidden * bias - 1
    expected |= {
        ("", "grad_output", "sum"): torch.ones(1, 2),
        ("", "grad_output", "deep.0.0"): d_tanh,
        ("child", "grad_output", "hidden"): torch.ones(1, 2),
        ("child", "grad_output", "more.data"): torch.ones(1, 2),
        ("child", "grad_output", "more.extra.0"): d_tanh,
        ("child", "grad_input", "0.0"): first,
        ("child", "grad_input", "0.1.0"): second,
        ("", "grad_input", "0"): first + 2 * second,
    }
    found = {(row["module"], row["tensor"], row["path"]): row for row in recorded.boundaries()}
    assert len(found) == len(recorded.boundaries())
    assert found.keys() == expected.keys()
    for place, tensor in expected.items():
        assert_holds(found[place], tensor)


def order_of(rows: list[Row]) -> list[str]:
    return [f"{row['module'] or 'root'} {row['tensor']}" for row in rows]


def test_rows_are_in_the_order_in_which_things_happen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x = torch.ones(1, 2, requires_grad=True)
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    assert [row["seq"] for row in recorded.rows] == list(range(len(recorded.rows)))
    forward = ["root input", "0 input", "0.0 input", "0.0 output", "0.1 input", "0.1 output", "0 output", "root output"]
    # The last module's output is its parents' output: the outermost is told first, the innermost leaves first.
    backward = ["root grad_output", "0 grad_output", "0.1 grad_output", "0.1 grad_input", "0.0 grad_output"]
    backward += ["0.0 grad_input", "0 grad_input", "root grad_input"]
    assert order_of(recorded.boundaries()) == forward + backward


def test_rows_of_in_place_modules_show_before_and_after(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.tensor([[1.0, -2.0, 3.0]])
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    before = model[0](x)
    assert before.min() < 0
    assert_holds(recorded.only(module="0", tensor="output"), before)
    assert_holds(recorded.only(module="1", tensor="input"), before)
    assert_holds(recorded.only(module="1", tensor="output"), before.relu())
    arriving = model[2].weight
    assert_holds(recorded.only(module="1", tensor="grad_output"), arriving)
    assert_holds(recorded.only(module="1", tensor="grad_input"), arriving * (before > 0))
    assert_holds(recorded.only(module="0", tensor="grad_output"), arriving * (before > 0))


class ResidualInPlace(nn.Module):
    """``out += x`` as in torchvision's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        out += x
        return self.relu(out)


def test_an_addition_in_place_keeps_the_branches_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), ResidualInPlace())
    x = torch.randn(4, 3)
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    with torch.no_grad():
        hidden = model[0](x)
        open_ = (model[1].conv(hidden) + hidden > 0).float()
    assert_holds(recorded.only(module="1.conv", tensor="grad_output"), open_)
    assert_holds(recorded.only(module="1.conv", tensor="grad_input"), open_ @ model[1].conv.weight)
    assert_holds(recorded.only(module="1", tensor="grad_input"), open_ @ model[1].conv.weight + open_)
    assert recorded.info.unmeasured == {}


def test_one_tensor_passed_several_times_is_the_sum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    leaf = x.clone().requires_grad_()
    out, weights = model(leaf, leaf, leaf)
    (out.sum() + weights.square().sum()).backward()
    expected = leaf.grad
    assert expected is not None

    def run() -> None:
        q = x.clone().requires_grad_() * 1
        out, weights = model(q, q, q)
        (out.sum() + weights.square().sum()).backward()

    recorded = record(model, tmp_path, run)
    assert [path for (path,) in recorded.columns("path", module="", tensor="input")] == ["0", "1", "2"]
    assert_holds(recorded.only(module="", tensor="grad_input"), expected)


def test_an_output_that_is_an_input_or_a_parameter_is_no_backward_boundary(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.weight

    model = nn.ModuleDict({"table": Table(), "same": nn.Identity(), "drop": nn.Dropout().eval()})
    for_all = {"model": model}

    def run() -> None:
        for _ in range(3):
            hidden = model["table"]() * 2
            model["drop"](model["same"](hidden)).sum().backward()

    recorded = record(for_all, tmp_path, run)
    forward = {row["module"] for row in recorded.where(tensor="output")}
    assert forward == {"table", "same", "drop"}
    assert not [row for row in recorded.rows if row["tensor"] in ("grad_output", "grad_input")]
    assert recorded.info.unmeasured == {}
    assert model["table"].weight._backward_hooks is None


def test_a_leaf_that_needs_a_gradient_has_a_grad_input_in_every_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    image = torch.ones(1, 2, requires_grad=True)

    def run() -> None:
        for _ in range(3):
            model(image).sum().backward()

    recorded = record(model, tmp_path, run)
    rows = recorded.where(tensor="grad_input")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert_holds(row, model.weight)


def test_an_unused_output_is_counted_and_the_rest_is_recorded_in_place(tmp_path: Path) -> None:
    """The gradient that arrives at a module's output comes before what it makes of it, sums included."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2 + x.sin(), x * 5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.two = nn.Linear(2, 2), Two()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.first(x))[0]

    model = Net()
    x = torch.ones(1, 2)
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    hidden = model.first(x)
    assert_holds(recorded.only(module="two", tensor="grad_input"), 2 + hidden.cos())
    backward = [row for row in recorded.boundaries() if row["phase"] == "backward"]
    assert order_of(backward) == ["root grad_output", "two grad_output", "two grad_input", "first grad_output"]
    assert recorded.info.unmeasured == {"gradient never arrived (output unused, or changed in place)": 1}


def test_a_view_that_is_changed_later_is_counted_and_breaks_nothing(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.flatten = nn.Linear(4, 4), nn.Flatten()

        def forward(self, x: Tensor) -> Tensor:
            flat = self.flatten(self.layer(x).view(-1, 2, 2))
            flat.mul_(2)
            return flat + 1

    model = Net()
    recorded = record(model, tmp_path, lambda: model(torch.ones(1, 4)).sum().backward())
    assert recorded.info.end == "completed"
    assert not recorded.where(module="flatten", tensor="grad_output")
    assert_holds(recorded.only(module="layer", tensor="grad", path="bias"), torch.full((4,), 2.0))
    assert recorded.info.unmeasured["gradient never arrived (output unused, or changed in place)"] >= 1


def test_a_view_that_torch_gives_up_breaks_nothing(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.same = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            first, _ = hidden.unbind(0)
            hidden.mul_(2)
            self.same(first)  # torch refuses to differentiate this
            return hidden

    model = Net()
    with pytest.raises(RuntimeError, match="is a view"):
        _ = Net()(torch.ones(2, 4)) + _given_up_view()
    recorded = record(model, tmp_path, lambda: model(torch.ones(2, 4)).sum().backward())
    assert recorded.info.end == "completed"
    assert len(recorded.where(module="same", tensor="output")) == 1
    assert recorded.info.unmeasured["gradient of a view whose base was changed in place"] >= 1
    assert_holds(recorded.only(module="layer", tensor="grad_output"), torch.full((2, 4), 2.0))


def _given_up_view() -> Tensor:
    base = torch.ones(2, 4, requires_grad=True) * 1
    first, _ = base.unbind(0)
    base.mul_(2)
    return first + 1


def test_containers_that_raise_are_counted_and_the_training_goes_on(tmp_path: Path) -> None:
    class Broken(Mapping[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            raise KeyError(key)

        def __iter__(self) -> Iterator[str]:
            return iter(["gone"])

        def __len__(self) -> int:
            return 1

    class Takes(nn.Module):
        def forward(self, x: Tensor, batch: Any) -> Tensor:
            return x * 2

    model = Takes()
    recorded = record(model, tmp_path, lambda: model(torch.ones(2), Broken()))
    assert recorded.info.end == "completed"
    assert recorded.info.unmeasured == {"KeyError while looking into arguments or results": 1}
    assert_holds(recorded.only(tensor="output"), torch.full((2,), 2.0))


def test_integers_are_recorded_only_where_they_enter_from_outside(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    criterion = nn.CrossEntropyLoss()
    tokens, labels = torch.tensor([1, 7, 3]), torch.tensor([0, 2, 1])

    def run() -> None:
        criterion(model(tokens), labels).backward()

    recorded = record({"model": model, "criterion": criterion}, tmp_path, run)
    rows = [row for row in recorded.rows if row["dtype"] == "int64"]
    seen = [(row["module"], row["tensor"], row["path"], row["phase"], row["min"], row["max"]) for row in rows]
    assert seen == [("", "input", "0", "input", 1, 7), ("criterion", "input", "1", "input", 0, 2)]
    assert [(row["nan_count"], row["norm"]) for row in rows] == [(0, None), (0, None)]


class Encoder(nn.Module):
    """Gives back a mean and what it has made of it, as variational autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, mean.exp() * 3


def test_what_a_call_makes_of_its_own_output_is_not_its_grad_output(tmp_path: Path) -> None:
    model = nn.Sequential(Encoder())
    x = torch.tensor([[0.5, -1.0]])

    def run() -> None:
        for _ in range(2):
            mean, sample = model(x)
            (5 * mean + sample).sum().backward()

    recorded = record(model, tmp_path, run)
    own = model[0].mean(x).exp() * 3
    for step in (0, 1):
        for module in ("", "0"):
            mean, sample = (recorded.only(step=step, module=module, tensor="grad_output", path=p) for p in "01")
            assert_holds(mean, torch.full((1, 2), 5.0))
            assert_holds(sample, torch.ones(1, 2))
        assert_holds(recorded.only(step=step, module="0.mean", tensor="grad_output"), 5 + own)


def test_an_output_that_only_its_own_call_uses_has_no_grad_output(tmp_path: Path) -> None:
    """A model that computes its loss itself: nothing comes to the logits from outside."""
    model, x = Encoder(), torch.tensor([[0.5, -1.0]])

    def run() -> None:
        for _ in range(2):
            model(x)[1].sum().backward()

    recorded = record(model, tmp_path, run)
    assert recorded.columns("step", "path", module="", tensor="grad_output") == [(0, "1"), (1, "1")]
    own = model.mean(x).exp() * 3
    for row in recorded.where(module="mean", tensor="grad_output"):
        assert_holds(row, own)
    assert recorded.info.unmeasured == {}


def test_a_nan_from_inside_is_not_said_to_come_from_outside(tmp_path: Path) -> None:
    class Bad(Encoder):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.mean(x)
            return mean, (mean * torch.tensor([1.0, float("nan")])).sum()

    model, x = Bad(), torch.tensor([[0.5, -1.0]])

    def run() -> None:
        mean, loss = model(x)
        (loss + mean.sum()).backward()

    recorded = record(model, tmp_path, run)
    rows = recorded.where(module="", tensor="grad_output", path="0", op=None)
    assert [(row["nan_count"], row["max"]) for row in rows] == [(0, 1.0)]
    assert recorded.only(module="mean", tensor="grad_output", op=None)["nan_count"] == 1


def test_a_nan_from_outside_is_seen_beside_the_calls_own_use(tmp_path: Path) -> None:
    model, x = Encoder(), torch.tensor([[0.5, -1.0]])

    def run() -> None:
        mean, sample = model(x)
        (mean * torch.tensor([1.0, float("nan")]) + sample).sum().backward()

    recorded = record(model, tmp_path, run)
    row = recorded.only(module="", tensor="grad_output", path="0")
    assert row["nan_count"] == 1
    assert row["max"] == pytest.approx(1.0, rel=1e-5)
    assert recorded.only(module="", tensor="grad_output", path="1")["nan_count"] == 0
