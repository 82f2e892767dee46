"""The backward pass in all the ways in which it can be run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrace.trace.schema import SCHEMA_VERSION
from tests.capture.tracing import Recorded, assert_holds, record

pytestmark = pytest.mark.usefixtures("no_optimizer_from_before")


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients_in(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return what autograd gives for the parameters of a copy of the model."""
    twin = copy.deepcopy(model)
    return dict(
        zip(dict(twin.named_parameters()), torch.autograd.grad(loss(twin), list(twin.parameters())), strict=True)
    )


def assert_gradients(recorded: Recorded, expected: dict[str, Tensor], **where: Any) -> None:
    rows = {
        f"{row['module']}.{row['path']}".lstrip("."): row
        for row in recorded.where(tensor="grad", phase="backward", **where)
    }
    assert rows.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_holds(rows[name], gradient)


def test_the_loss_and_the_parameters_gradients_are_recorded(tmp_path: Path) -> None:
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    expected = gradients_in(model, lambda m: m(x).square().sum())
    loss = model(x).square().sum()

    recorded = record(model, tmp_path, lambda: model(x).square().sum().backward())
    assert_holds(recorded.only(tensor="loss"), loss)
    assert recorded.only(tensor="loss")["module"] is None
    assert_gradients(recorded, expected)


def test_frozen_parameters_have_no_gradient_and_what_lies_before_them_has(tmp_path: Path) -> None:
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    model[2].requires_grad_(False)
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    assert {row["module"] for row in recorded.where(tensor="grad")} == {"0"}
    assert_holds(recorded.only(module="2", tensor="grad_input"), torch.ones(5, 2) @ model[2].weight)
    assert {row["module"] for row in recorded.where(tensor="param", phase="input")} == {"0", "2"}


def test_a_frozen_start_has_no_backward_boundaries(tmp_path: Path) -> None:
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    model[0].requires_grad_(False)
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    assert {row["module"] for row in recorded.where(tensor="grad_output")} == {"", "2"}
    assert not recorded.where(tensor="grad_input")
    assert recorded.info.unmeasured == {}


def test_passes_over_a_kept_graph_are_numbered_and_complete(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.inner = nn.Linear(2, 2), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return self.branch(hidden)

        def branch(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden) + hidden

    model = nn.Sequential(nn.Linear(2, 2), Sums())
    x = torch.ones(1, 2)

    def run() -> None:
        out = model(x).sum()
        out.backward(retain_graph=True)
        (3 * out).backward()

    recorded = record(model, tmp_path, run)
    first = [row for row in recorded.boundaries() if row["phase"] == "backward" and row["detail"] is None]
    second = [row for row in recorded.boundaries() if row["detail"] == "pass 2"]
    places = [(row["module"], row["call"], row["tensor"], row["path"]) for row in first]
    assert places == [(row["module"], row["call"], row["tensor"], row["path"]) for row in second]
    assert ("1", 0, "grad_input", "0") in places
    for one, two in zip(first, second, strict=True):
        assert two["norm"] == pytest.approx(3 * one["norm"])
    assert [row["detail"] for row in recorded.where(tensor="loss")] == [None, "pass 2"]
    assert {row["micro_step"] for row in recorded.rows} == {0}


def test_sums_over_several_edges_are_complete_in_every_pass(tmp_path: Path) -> None:
    class Twofold(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + x * x

    model = nn.Sequential(nn.Linear(2, 2), Twofold())
    x = torch.ones(1, 2)

    def run() -> None:
        out = model(x).sum()
        for _ in range(3):
            out.backward(retain_graph=True)

    recorded = record(model, tmp_path, run)
    expected = 2 + 2 * model[0](x)
    rows = recorded.where(module="1", tensor="grad_input")
    assert [row["detail"] for row in rows] == [None, "pass 2", "pass 3"]
    for row in rows:
        assert_holds(row, expected)
    arrived = recorded.where(module="0", tensor="grad_output")
    assert [row["seq"] < after["seq"] for row, after in zip(rows, arrived, strict=True)] == [True] * 3


def test_accumulated_passes_are_micro_steps(tmp_path: Path) -> None:
    model = mlp(3, 4, 2)
    batches = [torch.randn(5, 3) for _ in range(3)]
    expected = [gradients_in(model, lambda m, x=x: m(x).square().sum()) for x in batches]

    def run() -> None:
        optimizer = sgd(model)
        for batch in batches:
            model(batch).square().sum().backward()
        optimizer.step()
        model(batches[0]).sum().backward()

    recorded = record(model, tmp_path, run)
    for number, gradients in enumerate(expected):
        assert_gradients(recorded, gradients, step=0, micro_step=number)
    assert recorded.columns("step", "micro_step", "call", module="0", tensor="grad_output") == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 0),
        (1, 0, 0),
    ]


def test_calls_of_a_shared_module_are_told_apart(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2, bias=False)

    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(self.layer(x)))

    model = Thrice()
    x = torch.ones(1, 2, requires_grad=True)
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    assert recorded.columns("call", module="layer", tensor="output") == [(0,), (1,), (2,)]
    gradient = torch.ones(1, 2)
    for call in (2, 1, 0):
        assert_holds(recorded.only(module="layer", tensor="grad_output", call=call), gradient)
        gradient = gradient @ layer.weight
        assert_holds(recorded.only(module="layer", tensor="grad_input", call=call), gradient)


def test_autograd_grad_of_parameters_is_recorded_as_their_gradient(tmp_path: Path) -> None:
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    expected = gradients_in(model, lambda m: m(x).square().sum())

    def run() -> None:
        torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    recorded = record(model, tmp_path, run)
    assert_gradients(recorded, expected)
    assert_holds(recorded.only(tensor="loss"), model(x).square().sum())
    assert_holds(recorded.only(module="2", tensor="grad_output"), 2 * model(x))


def test_a_gradient_penalty_is_differentiated_twice(tmp_path: Path) -> None:
    model, x = mlp(3, 4, 1), torch.randn(5, 3)

    def penalty(m: nn.Module) -> Tensor:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(inputs).sum(), inputs, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + m[2].bias.sum()

    expected = gradients_in(model, penalty)
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs)

    def run() -> None:
        optimizer = sgd(model)
        penalty(model).backward()
        optimizer.step()

    recorded = record(model, tmp_path, run)
    assert recorded.info.end == "completed"
    assert_holds(recorded.only(module="0", tensor="grad_input", detail=None), slope)
    assert_gradients(recorded, expected, detail="pass 2")
    assert {(row["step"], row["micro_step"]) for row in recorded.rows} == {(0, 0)}


def test_forces_are_part_of_the_pass_that_they_belong_to(tmp_path: Path) -> None:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3, 4, 1)

        def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
            position = position.clone().requires_grad_()
            energy = self.net(position).sum()
            (slope,) = torch.autograd.grad(energy, position, create_graph=True)
            return energy, -slope

    model, x = Potential(), torch.randn(5, 3)
    expected = gradients_in(model, lambda m: sum(o.square().sum() for o in m(x)))

    def run() -> None:
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            energy, force = model(x)
            (energy.square() + force.square().sum()).backward()
            optimizer.step()

    recorded = record(model, tmp_path, run)
    assert_gradients(recorded, expected, step=0, detail="pass 2")
    energy, force = model(x)
    assert recorded.info.steps == 2
    assert {row["micro_step"] for row in recorded.rows} == {0}
    rows = recorded.where(step=0, module="", tensor="output")
    assert [row["path"] for row in rows] == ["0", "1"]
    assert rows[1]["shape"] == str(list(force.shape)) and energy.ndim == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_recomputed_and_seen_once(reentrant: bool, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(3, 4), mlp(4, 4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor, *, save: bool = True) -> Tensor:
            hidden = self.first(x)
            hidden = checkpoint(self.block, hidden, use_reentrant=reentrant) if save else self.block(hidden)
            return self.last(hidden)

    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 3)
    expected = gradients_in(model, lambda m: m(x, save=False).square().sum())
    twin = copy.deepcopy(model)
    plain = record(twin, tmp_path, lambda: twin(x, save=False).square().sum().backward())

    def run() -> None:
        for _ in range(2):
            model(x).square().sum().backward()
            model.zero_grad()

    recorded = record(model, tmp_path, run)
    assert recorded.info.steps == 2
    for step in (0, 1):
        assert_gradients(recorded, expected, step=step)
        assert {row["micro_step"] for row in recorded.where(step=step)} == {0}
        for module in ("first", "block", "block.0", "block.1", "block.2", "last"):
            for tensor in ("grad_output", "grad_input"):
                rows = recorded.where(step=step, module=module, tensor=tensor)
                (others,) = plain.where(module=module, tensor=tensor) or (None,)
                assert [r["norm"] for r in rows] == ([] if others is None else [pytest.approx(others["norm"])])
        phases = [p for (p,) in recorded.columns("phase", step=step, module="block.0", tensor="output")]
        assert phases == ["forward", "recompute"]
    assert {row["phase"] for row in recorded.where(module="first", tensor="output")} == {"forward"}


def test_a_checkpoint_in_a_second_pass_starts_neither_a_step_nor_a_pass(tmp_path: Path) -> None:
    """Without an optimizer an outermost call after a backward is a new step; a recomputation is no such call."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(5, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    net = Net()

    def run() -> None:
        (slope,) = torch.autograd.grad(net(x).sum(), net.body[0].weight, retain_graph=True)
        assert slope.isfinite().all()
        net(x).sum().backward()
        net(x).sum().backward()

    recorded = record(net, tmp_path, run)
    recomputed = recorded.where(phase="recompute", module="body", tensor="input")
    losses = recorded.where(tensor="loss")
    assert [row["step"] for row in recomputed] == [row["step"] for row in losses]
    assert [row["micro_step"] for row in recomputed] == [row["micro_step"] for row in losses]


def test_two_networks_against_each_other_share_their_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    generator, critic = mlp(2, 4, 3), mlp(3, 4, 1)
    noise, real = torch.randn(5, 2), torch.randn(5, 3)

    def run() -> None:
        of_critic, of_generator = sgd(critic), sgd(generator)
        for _ in range(3):
            of_critic.zero_grad()
            (critic(generator(noise).detach()) - critic(real)).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(generator(noise))).mean().backward()
            of_generator.step()

    recorded = record({"generator": generator, "critic": critic}, tmp_path, run)
    assert recorded.info.steps == 3
    names = {info.name for info in recorded.info.modules}
    assert names >= {"generator", "generator.0", "generator.2", "critic", "critic.0", "critic.2"}
    for step in range(3):
        assert recorded.columns("micro_step", step=step, tensor="loss") == [(0,), (1,)]
        assert recorded.columns("path", step=step, tensor="lr") == [("0.0",), ("1.0",)]
        assert recorded.columns("micro_step", "call", step=step, module="critic", tensor="output") == [
            (0, 0),
            (0, 1),
            (1, 0),
        ]
        updated = {row["module"] for row in recorded.where(step=step, tensor="param", phase="optimizer")}
        assert updated == {"generator.0", "generator.2", "critic.0", "critic.2"}
        assert len(recorded.where(step=step, module="generator", tensor="grad_output")) == 1
    assert recorded.where(module="critic", tensor="grad_input", micro_step=1)


def test_closures_run_several_passes_within_one_step(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 1), torch.randn(5, 2)

    def run() -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    recorded = record(model, tmp_path, run)
    assert {step for (step,) in recorded.columns("step", tensor="loss")} == {0, 1}
    micro = [m for (m,) in recorded.columns("micro_step", step=0, tensor="loss")]
    assert micro == list(range(len(micro))) and len(micro) > 1


def test_without_an_optimizer_each_forward_after_a_backward_is_a_step(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 1), torch.randn(5, 2)

    def run() -> None:
        for _ in range(3):
            gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient

    recorded = record(model, tmp_path, run)
    assert recorded.columns("step", tensor="loss") == [(0,), (1,), (2,)]
    states = recorded.where(tensor="param", phase="optimizer", path="weight")
    assert [row["step"] for row in states] == [0, 1, 2]
    assert_holds(states[-1], model.weight)


def test_a_pass_that_raises_leaves_the_next_one_right(tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        armed = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if Fails.armed:
                raise ValueError("in backward")
            return gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return hidden * 2 + Fails.apply(hidden)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.tail = Net(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(self.net(x))

    model, x = Outer(), torch.ones(1, 2)

    def run() -> None:
        with pytest.raises(ValueError, match="in backward"):
            model(x).sum().backward()
        Fails.armed = False
        model(x).sum().backward()

    recorded = record(model, tmp_path, run)
    rows = recorded.where(module="net.layer", tensor="grad_output")
    slope = 3 * (1 - model.net(x).tanh() ** 2)
    assert len(rows) == 1
    assert_holds(rows[0], slope)
    assert recorded.info.end == "completed"


def test_gradients_given_to_backward_start_the_pass(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 3), torch.ones(1, 2)
    given = torch.tensor([[1.0, -2.0, 4.0]])
    recorded = record(model, tmp_path, lambda: model(x).backward(given))
    assert_holds(recorded.only(module="", tensor="grad_output"), given)
    assert_holds(recorded.only(tensor="loss"), model(x))


def test_several_losses_are_told_apart(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)

    def run() -> None:
        out = model(x).sum()
        torch.autograd.backward([out, 2 * out])

    recorded = record(model, tmp_path, run)
    rows = recorded.where(tensor="loss")
    assert [row["path"] for row in rows] == ["0", "1"]
    assert rows[1]["max"] == pytest.approx(2 * rows[0]["max"])
    assert_holds(recorded.only(module="", tensor="grad_output"), torch.full((1, 1), 3.0))


def test_a_user_hook_that_cleans_a_gradient_is_seen_after_it(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)

    def run() -> None:
        hidden = model[0](x)
        hidden.register_hook(lambda gradient: torch.nan_to_num(gradient, nan=7.0))
        (hidden * torch.tensor(float("nan"))).sum().backward()

    recorded = record(model, tmp_path, run)
    assert_holds(recorded.only(module="0", tensor="grad_output"), torch.full((1, 2), 7.0))
    assert recorded.info.schema_version == SCHEMA_VERSION


def test_custom_functions_with_several_inputs_are_followed(tmp_path: Path) -> None:
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, factor: float, a: Tensor, mask: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            ctx.factor = factor
            ctx.mark_non_differentiable(mask)
            return a * factor + b, mask

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
            return None, gradient * ctx.factor, None, gradient * 10

    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return Weighted.apply(3.0, a, torch.ones(1), b)[0]

    model = Net()
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 1
    recorded = record(model, tmp_path, lambda: model(a, b).sum().backward())
    assert_holds(recorded.only(tensor="grad_input", path="0"), torch.full((2,), 3.0))
    assert_holds(recorded.only(tensor="grad_input", path="1"), torch.full((2,), 10.0))
