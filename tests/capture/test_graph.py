"""The walk over the autograd graph: linear, and holding nothing that outlives the pass."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrace.capture.graph import GraphMap, edge_of, sequence_number
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning


class Chain(nn.Module):
    """A module in a module in a module; each adds one operation."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Chain(depth - 1) if depth > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.001 if self.inner is None else self.inner(x) * 1.001


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.001


def wide(per_level: tuple[int, ...]) -> nn.Module:
    """Return modules nested as deep as ``per_level`` is long, so many at each level."""
    if not per_level:
        return Scale()
    return nn.Sequential(*(wide(per_level[1:]) for _ in range(per_level[0])))


def nodes_behind(tensor: Tensor) -> int:
    """Count the nodes of a graph, by a walk of our own."""
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [edge[0] for edge in node.next_functions]
    return len(seen)


def visits_of(model: nn.Module, path: Path) -> tuple[int, int]:
    """Return how many nodes the tracer looked at in one call, and how many there are."""
    batch = torch.ones(3, requires_grad=True)
    with Tracer(model, path / "run.parquet", existing="overwrite") as tracer:
        out = model(batch)
    return tracer._graph.visits, nodes_behind(out)


def test_the_walk_is_linear_in_a_chain_150_deep(tmp_path: Path) -> None:
    visits, nodes = visits_of(Chain(150), tmp_path)
    assert nodes == 151
    assert visits <= 2 * nodes


def test_the_walk_is_linear_in_2000_modules_nested_5_deep(tmp_path: Path) -> None:
    model = wide((5, 4, 4, 5, 4))
    assert 2000 <= len(list(model.modules())) <= 2200
    visits, nodes = visits_of(model, tmp_path)
    assert nodes == 1601
    assert visits <= 3 * nodes


def test_the_walk_grows_with_the_depth_and_not_with_its_square(tmp_path: Path) -> None:
    short, long = (visits_of(Chain(depth), tmp_path)[0] for depth in (40, 160))
    assert long <= 4.5 * short


def test_entrances_are_the_edges_into_the_inputs() -> None:
    x, y = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True)
    graph = GraphMap()
    inputs = graph.edges_of([("0", x), ("y", y), ("again", x)])
    assert inputs == {(x.grad_fn, 0): "0", edge_of(y): "y"}
    start = sequence_number()
    out = (x * y + x).sum()
    region = graph.region([out.grad_fn], inputs, start)
    found = sorted((type(e.source).__name__, e.slot, e.path) for e in region.entrances(inputs))
    assert found == [("AddBackward0", 1, "0"), ("MulBackward0", 0, "0"), ("MulBackward0", 1, "y")]
    assert region.certain
    assert region.own_uses == []


def test_an_edge_behind_another_output_is_not_certain_to_be_passed() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    graph = GraphMap()
    inputs = graph.edges_of([("0", x)])
    start = sequence_number()
    used, unused = x * 2, x * 3
    outer = used + x
    assert graph.region([used.grad_fn, unused.grad_fn], inputs, start).certain is False
    region = graph.region([outer.grad_fn], inputs, start)
    assert len(region.entrances(inputs)) == 3
    assert region.certain is False


def test_a_leaf_that_is_no_input_of_any_call_is_no_way_out() -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 1
    graph = GraphMap()
    inputs = graph.edges_of([("0", x)])
    start = sequence_number()
    out = x * weight
    assert [e.path for e in graph.region([out.grad_fn], inputs, start).entrances(inputs)] == ["0"]


def only_entrance(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Any, GraphMap]:
    graph = GraphMap()
    inputs = graph.edges_of([("0", x)])
    start = sequence_number()
    out = function(x)
    found = graph.only_entrance(out.grad_fn, inputs, start)
    return None if found is None else (type(found.source).__name__, found.slot, found.path), graph


def test_a_layer_is_told_without_a_walk() -> None:
    linear, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True) * 1
    assert only_entrance(linear, x)[0] == ("AddmmBackward0", 1, "0")  # over the transpose of the weight too
    assert only_entrance(torch.relu, x)[0] == ("ReluBackward0", 0, "0")


OLDER = torch.ones(2, 3, requires_grad=True) * 2
NO_LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda x: x * x,
    "two nodes": lambda x: (x * 2).exp(),
    "a node made before": lambda x: x + OLDER,
    "a branch inside": lambda x: x + (x * 2),
    "a weight made of the input": lambda x: nn.functional.linear(x, x.mean(0).diag()),
}


@pytest.mark.parametrize("function", NO_LAYERS.values(), ids=NO_LAYERS.keys())
def test_what_is_no_layer_takes_a_walk(function: Callable[[Tensor], Tensor]) -> None:
    assert only_entrance(function, torch.ones(2, 3, requires_grad=True) * 1)[0] is None


def test_a_parameter_that_is_an_input_of_a_call_makes_it_no_layer() -> None:
    weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True) * 1
    graph = GraphMap()
    inputs = graph.edges_of([("0", x), ("weight", weight)])
    start = sequence_number()
    assert graph.only_entrance(nn.functional.linear(x, weight).grad_fn, inputs, start) is None


def test_a_layer_is_known_to_the_module_around_it() -> None:
    x = torch.ones(2, 3, requires_grad=True) * 1
    graph = GraphMap()
    inputs = graph.edges_of([("0", x)])
    start = sequence_number()
    out = nn.Linear(3, 3)(x)
    assert graph.only_entrance(out.grad_fn, inputs, start) is not None
    region = graph.region([out.grad_fn], inputs, start)
    assert [(entrance.slot, entrance.path) for entrance in region.entrances(inputs)] == [(1, "0")]


def test_own_uses_are_the_edges_from_inside_to_an_output() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    graph = GraphMap()
    inputs = graph.edges_of([("0", x)])
    start = sequence_number()
    mean = x * 2
    sample = mean + 1
    region = graph.region([mean.grad_fn, sample.grad_fn], inputs, start)
    assert [(step[0], step[2]) for step in region.own_uses] == [(sample.grad_fn, (mean.grad_fn, 0))]
    outer = graph.region([mean.grad_fn, sample.grad_fn], inputs, start)
    assert outer.own_uses == region.own_uses


def test_callbacks_of_the_outer_call_come_first_and_sums_before_all() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    graph = GraphMap()
    order: list[str] = []
    graph.on_arrival(x.grad_fn, lambda _: order.append("inner"))
    graph.on_arrival(x.grad_fn, lambda _: order.append("outer"))
    graph.before_arrival(x.grad_fn, lambda _: order.append("sum"))
    x.sum().backward()
    assert order == ["sum", "outer", "inner"]


# Memory ------------------------------------------------------------------------------------------------------


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive() -> tuple[int, int]:
    """Count the tensors and the autograd nodes that Python knows of."""
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), Tensor) for o in objects)
    nodes = sum(re.fullmatch(r"\w+Backward\d|AccumulateGrad", type(o).__name__) is not None for o in objects)
    return tensors, nodes


class Branches(nn.Module):
    """In-place, several outputs, one of them unused, and a sum over several edges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.norm, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.relu(self.a(x)))
        hidden += x
        return {"out": self.b(hidden) + hidden, "unused": hidden * 2}


def backward(model: nn.Module, x: Tensor) -> None:
    model(x)["out"].sum().backward()
    model.zero_grad()


def forward_only(model: nn.Module, x: Tensor) -> None:
    model(x)


def double_backward(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)["out"].sum(), x, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), list(model.b.parameters()), allow_unused=True)


def raising(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(RuntimeError):
        model(x.double())


@pytest.mark.parametrize("step", [backward, forward_only, double_backward, raising])
def test_nothing_stays_alive_over_50_steps_without_the_garbage_collector(
    step: Callable[[nn.Module, Tensor], None], tmp_path: Path
) -> None:
    model, x = Branches(), torch.ones(2, 4)
    counts = []
    with Tracer(model, tmp_path / "run.parquet") as tracer, no_garbage_collector():
        for number in range(51):
            tracer.step(number)
            step(model, x)
            if number in (0, 50):
                counts.append(alive())
    assert counts[0] == counts[1]


def test_a_finished_recording_holds_no_graph(tmp_path: Path) -> None:
    model, x = Branches(), torch.ones(2, 4)
    gc.collect()
    before = alive()
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        backward(model, x)
    assert tracer.info.records > 0
    gc.collect()
    assert alive() == before


def test_a_recording_that_fails_in_the_middle_of_a_call_lets_go_of_its_graph(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            tracer._session.fail(ValueError("in the middle"))
            return x * 2

    model, x = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4)), torch.ones(2, 4)
    gc.collect()
    before = alive()
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        with pytest.warns(GradtraceWarning, match="in the middle"):
            model(x)
        assert tracer._calls._thread.stack == []
        gc.collect()
        assert alive() == before
