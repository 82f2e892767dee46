"""Which autograd node made the first non-finite gradient, out of which operands."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrace.capture.names import ModuleEntry, Names
from gradtrace.capture.operations.births import MOST, Birth
from gradtrace.capture.operations.nodes import AnomalySays, BackwardNodes, anomaly_says, walk

Seen = list[tuple[str, str, float | None, float | None]]


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def births_of(output: Tensor, *inputs: Tensor, gradient: Tensor | None = None) -> list[Birth]:
    """Differentiate ``output`` and return what was born."""
    with BackwardNodes(lambda number: None) as nodes:
        nodes.watch([output])
        torch.autograd.grad(output, inputs, gradient)
    return nodes.births


def operands(birth: Birth) -> Seen:
    return [(o.tensor, o.path, o.measure.min, o.measure.max) for o in birth.operands]


# A slope is infinite or undefined where the forward is finite: each row's numbers follow from the formula.
SLOPES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...], str, tuple[int, int, int], Seen]] = {
    # 1 / (2 sqrt x), of which the result is saved
    "sqrt": (torch.sqrt, (0, 4), "SqrtBackward0", (0, 1, 0), [("input", "saved.result", 0, 2)]),
    # x ** p: p x ** (p - 1)
    "pow": (lambda x: x**0.5, (0, 4), "PowBackward0", (0, 1, 0), [("input", "saved.self", 0, 4)]),
    # -1 / sqrt(1 - x ** 2)
    "acos": (torch.acos, (1, 0), "AcosBackward0", (0, 0, 1), [("input", "saved.self", 0, 1)]),
    # -1 / x ** 2 overflows where 1 / x does not
    "reciprocal": (
        torch.reciprocal,
        (1e-30, 1),
        "ReciprocalBackward0",
        (0, 0, 1),
        [("input", "saved.result", 1, 1e30)],
    ),
    # -0.5 result ** 3
    "rsqrt": (torch.rsqrt, (1e-30, 1), "RsqrtBackward0", (0, 0, 1), [("input", "saved.result", 1, 1e15)]),
}


@pytest.mark.parametrize("case", SLOPES)
def test_a_birth_has_the_nodes_name_the_counts_and_what_explains_them(case: str) -> None:
    function, values, op, counts, saved = SLOPES[case]
    source = leaf(*values)
    birth = births_of(function(source), source, gradient=torch.ones(2))[0]
    assert birth.op == op
    assert (birth.tensor, birth.index) == ("grad_input", 0)
    assert (birth.result.nan, birth.result.posinf, birth.result.neginf) == counts
    seen = operands(birth)
    assert seen[0] == ("grad_output", "0", 1, 1)
    for row in saved:
        assert (row[0], row[1]) in [s[:2] for s in seen]
        found = next(s for s in seen if s[1] == row[1])
        assert found[2:] == pytest.approx(row[2:])


def test_a_division_shows_its_denominator() -> None:
    numerator, denominator = leaf(0, 1), leaf(0, 2)
    birth = births_of(numerator / denominator, numerator, denominator, gradient=torch.ones(2))[0]
    assert (birth.op, birth.index) == ("DivBackward0", 0)
    assert (birth.result.posinf, birth.result.max) == (1, 0.5)
    assert operands(birth)[1:] == [("input", "saved.other", 0, 2), ("input", "saved.self", 0, 1)]


def test_the_number_of_the_gradient_that_went_bad_is_named() -> None:
    base, exponent = leaf(0.0), leaf(0.5)
    birth = births_of(torch.pow(base, exponent), base, exponent, gradient=torch.ones(1))[0]
    assert (birth.op, birth.index) == ("PowBackward1", 0)
    tiny = leaf(1e-30)
    birth = births_of(leaf(1.0) / tiny, tiny, gradient=torch.ones(1))[0]
    assert (birth.op, birth.index, birth.result.neginf) == ("DivBackward0", 1, 1)  # -1 / 1e-60


def test_only_the_first_node_of_a_chain_is_a_birth() -> None:
    point = leaf(1.0, 2.0)
    distance = ((point - point.detach()) ** 2).sum().sqrt()
    births = births_of(distance, point)
    assert [(birth.op, birth.result.posinf) for birth in births] == [("SqrtBackward0", 1)]


def test_anomaly_detection_stops_later_than_the_birth() -> None:
    point = leaf(1.0, 2.0)
    with BackwardNodes(lambda number: None) as nodes, pytest.raises(RuntimeError) as caught:
        with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
            anomaly = torch.autograd.detect_anomaly(check_nan=True)
        with anomaly:
            distance = ((point - point.detach()) ** 2).sum().sqrt()
            nodes.watch([distance])
            with pytest.warns(UserWarning, match="Error detected in PowBackward0"):
                torch.autograd.grad(distance, point)
    assert [birth.op for birth in nodes.births] == ["SqrtBackward0"]
    message = "Function 'PowBackward0' returned nan values in its 0th output."
    assert anomaly_says(caught.value) == AnomalySays("PowBackward0", 0, message)
    (line,) = nodes.births[0].traceback[-1:]
    assert line.file == __file__
    assert line.code == "distance = ((point - point.detach()) ** 2).sum().sqrt()"


def test_other_errors_say_nothing_of_anomaly_detection() -> None:
    assert anomaly_says(RuntimeError("CUDA out of memory")) is None
    assert anomaly_says(RuntimeError("Function 'MyBackward' returned nan values in its 12th output.")) == AnomalySays(
        "MyBackward", 12, "Function 'MyBackward' returned nan values in its 12th output."
    )


def test_formulas_that_repair_themselves_are_no_births() -> None:
    zeros = leaf(0, 0)
    pairs = torch.zeros(1, 2, 3, requires_grad=True)
    output = zeros.norm() + zeros.std() + torch.cdist(pairs, pairs).sum() + nn.functional.normalize(zeros, dim=0).sum()
    assert births_of(output, zeros, pairs) == []


def test_gradients_that_arrive_bad_are_no_birth() -> None:
    source = leaf(1, 2)
    assert births_of(source.exp() * 2, source, gradient=torch.tensor([math.nan, 1.0])) == []


def test_overflow_in_half_precision_is_a_birth() -> None:
    source = leaf(300, 1, dtype=torch.float16)
    birth = births_of(source * 1000, source, gradient=torch.tensor([1, 100], dtype=torch.float16))[0]
    assert (birth.op, birth.result.posinf) == ("MulBackward0", 1)
    assert birth.result.dtype is torch.float16


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        result = left * right
        ctx.save_for_backward(left, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        left, result = ctx.saved_tensors
        return gradient * result / left, None


def test_a_custom_function_is_a_node_with_its_own_name_and_saved_tensors() -> None:
    left = leaf(0, 2)
    birth = births_of(Product.apply(left, torch.tensor([3.0, 5.0])), left, gradient=torch.ones(2))[0]
    assert birth.op == "ProductBackward"
    assert operands(birth)[1:] == [("input", "saved.0", 0, 2), ("input", "saved.1", 0, 10)]


def test_the_owner_is_asked_for_by_sequence_number() -> None:
    names = Names((), ())
    root = nn.Identity()
    names.add_root(root, "Model")
    entry = names.entry(root)
    assert entry is not None
    source = leaf(0.0)
    middle = source.sqrt()
    node: Any = middle.grad_fn
    number = node._sequence_nr()

    def module_of(asked: int) -> tuple[ModuleEntry, int] | None:
        return (entry, 2) if asked == number else None

    with BackwardNodes(module_of) as nodes:
        nodes.watch([middle * 2])
        torch.autograd.grad(middle * 2, source, retain_graph=True)
        (middle * 2).sum().backward(inputs=[source])
    assert (nodes.births[0].owner, nodes.births[0].call) == (entry, 2)


def test_what_is_saved_under_checkpointing_is_unpacked_once_only() -> None:
    source = leaf(0, 4)
    count = []

    def stage(value: Tensor) -> Tensor:
        count.append(1)
        return value.sqrt() * 1

    birth = births_of(checkpoint(stage, source, use_reentrant=False), source, gradient=torch.ones(2))[0]
    assert (birth.op, birth.result.posinf) == ("SqrtBackward0", 1)
    assert len(count) == 2  # forward and one recomputation
    assert [row[1] for row in operands(birth)] == ["0"]


def test_the_gradients_are_the_same_bits_as_without() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    batch = torch.randn(5, 3)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(batch).square().mean(), list(model.parameters())))

    plain = gradients()
    with BackwardNodes(lambda number: None) as nodes:
        output = model(batch).square().mean()
        nodes.watch([output])
        watched = torch.autograd.grad(output, list(model.parameters()))
    assert nodes.births == []
    assert all(torch.equal(left, right) for left, right in zip(plain, watched, strict=True))


def test_the_hooks_are_gone_afterwards_and_nothing_keeps_the_graph() -> None:
    source = leaf(0.0)
    output = source.sqrt()
    with BackwardNodes(lambda number: None) as nodes:
        nodes.watch([output])
        nodes.watch([output])  # once is enough
        torch.autograd.grad(output, source, retain_graph=True)
    assert len(nodes.births) == 1
    torch.autograd.grad(output, source, retain_graph=True)
    assert len(nodes.births) == 1
    watch = weakref.ref(nodes)
    gc.disable()
    try:
        del nodes
        assert watch() is None
    finally:
        gc.enable()


def test_only_the_first_births_are_kept_and_the_others_counted() -> None:
    source = leaf(0.0)
    births = MOST + 3
    with BackwardNodes(lambda number: None) as nodes:
        output = torch.stack([source.sqrt() for _ in range(births)]).sum()
        nodes.watch([output])
        torch.autograd.grad(output, source)
    assert (len(nodes.births), nodes.left_out) == (MOST, 3)


def test_the_walk_meets_each_node_once_and_no_leaf() -> None:
    source = leaf(1.0)
    middle = source * 2
    output = middle.exp() + middle.log()
    names = sorted(node.name() for node in walk([output.grad_fn, None]))
    assert names == ["AddBackward0", "ExpBackward0", "LogBackward0", "MulBackward0"]
