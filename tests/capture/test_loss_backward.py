"""The loss code's own backward pass: finite gradients in, a non-finite one out. Slopes are worked out by hand."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture.losses import INF, counts, examine, examine_backward, leaf, new_session, operands, ops, stacks
from torch import Tensor, nn

from gradtrace.capture.graph import sequence_number
from gradtrace.capture.loss.code import LossCode
from gradtrace.capture.loss.region import loss_region


def test_the_slope_of_a_root_at_zero_is_infinite() -> None:
    found = examine(lambda x: x.sqrt().sum(), leaf(0.0, 4.0))

    assert found.finding is None
    (birth,) = found.backward
    assert (birth.op, birth.owner, birth.call, birth.tensor, birth.index) == (
        "SqrtBackward0",
        None,
        None,
        "grad_input",
        0,
    )
    assert counts(birth) == (0, 1, 0)
    assert birth.result.max == 0.25
    assert operands(birth) == {"0": (1.0, 1.0), "saved.result": (0.0, 2.0)}
    assert [operand.tensor for operand in birth.operands] == ["grad_output", "input"]
    assert birth.traceback[-1].code == "found = examine(lambda x: x.sqrt().sum(), leaf(0.0, 4.0))"


@pytest.mark.parametrize(
    ("loss", "values", "op", "index", "made"),
    [
        (lambda x: (x.pow(2).sum().sqrt() - 1).pow(2), (0.0, 0.0), "SqrtBackward0", 0, (0, 0, 1)),
        (lambda x: (x * 0).sqrt().sum(), (1.0, 2.0), "SqrtBackward0", 0, (0, 2, 0)),
        (lambda x: x.pow(0.5).sum(), (0.0, 4.0), "PowBackward0", 0, (0, 1, 0)),
        (lambda x: torch.where(x > 0, x.log(), 0.0).sum(), (0.0, 1.0), "LogBackward0", 0, (1, 0, 0)),
        (lambda x: torch.where(x > 1, 1 / (x - 1), 0.0).sum(), (1.0, 2.0), "ReciprocalBackward0", 0, (1, 0, 0)),
        (lambda x: (x[0] / x[1])[None][x[1:] > 0].sum(), (0.0, 0.0), "DivBackward0", 0, (1, 0, 0)),
        (lambda x: torch.atan2(x[0], x[1]), (0.0, 0.0), "none", 0, (0, 0, 0)),
        (lambda x: x.std(), (2.0, 2.0), "none", 0, (0, 0, 0)),
        (lambda x: x.norm(), (0.0, 0.0), "none", 0, (0, 0, 0)),
        (lambda x: F.binary_cross_entropy(x, torch.tensor([1.0, 0.0])), (0.0, 0.5), "none", 0, (0, 0, 0)),
        (lambda x: F.huber_loss(x, torch.zeros(2)), (0.0, 2.0), "none", 0, (0, 0, 0)),
        (
            lambda x: F.kl_div(x.log_softmax(0), torch.tensor([0.0, 1.0]), reduction="sum"),
            (0.0, 1.0),
            "none",
            0,
            (0, 0, 0),
        ),
        (lambda x: x.clamp(min=1e-6).log().mean(), (0.0, 1.0), "none", 0, (0, 0, 0)),
    ],
)
def test_only_the_node_that_makes_it_is_blamed(
    loss: Callable[[Tensor], Tensor], values: tuple[float, ...], op: str, index: int, made: tuple[int, int, int]
) -> None:
    found = examine(loss, leaf(*values))

    if op == "none":  # the formulas divide by zero inside of the node, and mend it there
        assert found.backward == []
    else:
        first = found.backward[0]
        assert (first.op, first.index, counts(first)) == (op, index, made)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_accelerator_s_numbers_give_the_same_births(on_device: bool) -> None:
    found = examine(lambda x: (x * 2).sqrt().sum(), leaf(0.0, 2.0), on_device=on_device)

    (birth,) = found.backward
    assert (birth.op, birth.index, counts(birth), birth.result.max) == ("SqrtBackward0", 0, (0, 1, 0), 0.25)
    assert operands(birth)["0"] == (1.0, 1.0)
    assert birth.traceback[-1].function == "<lambda>"


def test_a_gradient_penalty_is_loss_code_down_to_the_nodes_that_its_gradient_was_made_by() -> None:
    critic = nn.Linear(2, 1)
    with torch.no_grad():
        critic.weight.zero_()
    x = torch.ones(1, 2, requires_grad=True)
    start = sequence_number()
    score = critic(x)
    inside = [(start, sequence_number())]
    with stacks():
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = (gradient.pow(2).sum().sqrt() - 1).pow(2)
    assert gradient.grad_fn in (loss_region([penalty], inside) or [])
    assert score.grad_fn not in (loss_region([penalty], inside) or [])

    found = examine_backward([penalty], [critic.weight], inside=inside)

    # The gradient is the weight, which is 0: 2 * (0 - 1) * d sqrt(0) = -2 * inf.
    assert (found.backward[0].op, counts(found.backward[0])) == ("SqrtBackward0", (0, 0, 1))
    assert found.backward[0].traceback[-1].code == "penalty = (gradient.pow(2).sum().sqrt() - 1).pow(2)"


def test_a_double_backward_is_loss_code_whatever_its_thread_s_numbers_are() -> None:
    x = leaf(1.0)
    with stacks():
        cube = x.pow(3)
        (slope,) = torch.autograd.grad(cube, x, create_graph=True)
    every_number = [(0, 2**62)]  # an engine's thread counts for itself, and may hit on those of a module call

    nodes = loss_region([slope], every_number)

    assert nodes is not None
    assert slope.grad_fn in nodes
    assert all("parent_" in node.metadata for node in nodes)
    assert loss_region([cube], every_number) == []


def test_nodes_inside_of_module_calls_and_leaves_are_not_loss_code() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    start = sequence_number()
    output = model(torch.ones(1, 2))
    inside = [(start, sequence_number())]
    loss = (output * 2).exp().sum() + model[0].weight.sum()

    nodes = loss_region([loss], inside)

    assert nodes is not None
    names = ["MulBackward0", "ExpBackward0", "SumBackward0", "SumBackward0", "AddBackward0"]
    assert [node.name() for node in nodes] == names


def test_the_walk_takes_each_node_once_however_many_paths_lead_to_it() -> None:
    x = leaf(1.0)
    for _ in range(40):
        x = x + x  # 2 ** 40 paths
    nodes = loss_region([x, x.detach(), x.sum()], [])
    assert nodes is not None
    assert len(nodes) == 41


def test_a_loss_of_too_many_operations_is_said_and_not_checked() -> None:
    x = leaf(0.0)
    loss = x.sqrt()
    for _ in range(20_000):
        loss = loss + 1.0

    found = examine_backward([loss], [x])

    assert found.backward == []
    assert dict(found.session.unmeasured) == {"loss code of more than 20,000 operations": 1}


def test_gradients_are_bit_identical_and_stolen_as_before() -> None:
    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(x.tanh() * 3, torch.tensor([1, 0])) + x.pow(2).mean()

    torch.manual_seed(1)
    plain = torch.randn(2, 5, requires_grad=True)
    watched = plain.detach().clone().requires_grad_()
    loss_of(plain).backward()
    found = examine(loss_of, watched)

    assert found.backward == []
    assert torch.equal(plain.grad, watched.grad)


def arrived_at(x: Tensor, code: LossCode | None) -> tuple[int, int]:
    """Return where the gradient was that left the loss code for ``x``, and where ``x.grad`` is."""
    addresses: list[int] = []
    loss = (x * torch.arange(1000.0)).sum()
    multiplication = loss.grad_fn.next_functions[0][0]
    multiplication.register_hook(lambda results, given: addresses.append(results[0].data_ptr()))
    if code is not None:
        code.backward_begins([loss], [])
    loss.backward()
    if code is not None:
        code.backward_ended()
    return addresses[0], x.grad.data_ptr()


def test_a_gradient_is_taken_over_and_not_copied_just_as_without_the_checks() -> None:
    left, arrived = arrived_at(torch.zeros(1000, requires_grad=True), None)
    assert left == arrived
    left, arrived = arrived_at(torch.zeros(1000, requires_grad=True), LossCode(new_session()))
    assert left == arrived


def test_no_gradient_is_kept_alive() -> None:
    x = torch.zeros(1000, requires_grad=True)
    code = LossCode(new_session())
    arrived_at(x, code)
    gradient = weakref.ref(x.grad)
    x.grad = None
    assert gradient() is None


def test_a_gradient_that_leaves_the_loss_code_is_measured_once_with_the_boundary_that_it_arrives_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = new_session()
    measured: list[torch.Size] = []
    original = session.statistics.measure
    monkeypatch.setattr(session.statistics, "measure", lambda t: measured.append(t.shape) or original(t))
    model = nn.Linear(3, 4)
    start = sequence_number()
    output = model(torch.ones(2, 3))
    inside = [(start, sequence_number())]
    output.grad_fn.register_prehook(lambda gradients: session.statistics.measure_once(gradients[0]) and None)
    loss = F.cross_entropy(output, torch.tensor([1, 2]))

    code = LossCode(session)
    code.backward_begins([loss], inside)
    loss.backward()
    code.backward_ended()

    assert measured == [torch.Size([]), torch.Size([2, 4])]  # the loss, and the gradient of the logits


def test_nothing_of_ours_stays_on_a_graph_that_is_used_again() -> None:
    x = leaf(0.0, 4.0)
    session = new_session()
    code = LossCode(session)
    loss = x.sqrt().sum()
    for _ in range(2):
        code.backward_begins([loss], [])
        loss.backward(retain_graph=True)
        code.backward_ended()
    assert ops(code.births()) == ["SqrtBackward0", "SqrtBackward0"]

    loss.backward()  # without us
    assert code.births() == []


def test_the_graph_dies_with_the_loss() -> None:
    x = leaf(0.0, 4.0)
    session = new_session()
    code = LossCode(session)
    loss = x.exp().log().sum()
    mark = torch.Generator()
    loss.grad_fn.metadata["mark"] = mark
    alive = weakref.ref(mark)
    del mark
    gc.collect()
    gc.disable()
    try:
        code.backward_begins([loss], [])
        loss.backward()
        code.backward_ended()
        del loss
        assert alive() is None
    finally:
        gc.enable()


def test_a_hook_of_the_user_s_that_mends_a_gradient_is_seen_after_it() -> None:
    x = leaf(0.0, 4.0)
    with stacks():
        y = x * 1
        y.register_hook(lambda gradient: gradient.nan_to_num(posinf=0.0))
        loss = y.sqrt().sum()
    found = examine_backward([loss], [x])
    assert ops(found.backward) == ["SqrtBackward0"]
    assert x.grad.tolist() == [0.0, 0.25]


def test_a_function_of_the_user_s_own_is_judged_like_any_other() -> None:
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sqrt()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient / (2 * x.sqrt())

    found = examine(lambda x: Root.apply(x).sum(), leaf(0.0, 4.0))

    assert [(birth.op, counts(birth)) for birth in found.backward] == [("RootBackward", (0, 1, 0))]
    assert "Root.apply(x)" in found.backward[0].traceback[-1].code


def test_gradients_of_a_pass_under_create_graph_get_no_history_from_the_checks() -> None:
    x = leaf(1.0, 4.0)
    session = new_session()
    code = LossCode(session)
    loss = x.pow(3).sum()
    code.backward_begins([loss], [])
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    code.backward_ended()
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert gradient.tolist() == [3.0, 48.0]
    assert second.tolist() == [6.0, 24.0]
    assert code.births() == []


def test_a_loss_that_is_infinite_already_gives_nan_in_backward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = examine(lambda x: (x.log() * 0).sum(), leaf(0.0, 1.0))
    # d log = 0 * 1/0
    assert [(birth.op, counts(birth)) for birth in found.backward] == [
        ("MulBackward0", (0, 0, 0)),
        ("LogBackward0", (1, 0, 0)),
    ][1:]
    assert found.gradients[0] is not None
    assert found.gradients[0].isnan().tolist() == [True, False]
    assert INF not in found.gradients[0].tolist()
