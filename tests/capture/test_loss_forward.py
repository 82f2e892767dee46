"""Which operation made a loss non-finite. Every expected value is worked out by hand from the operation itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture.losses import (
    INF,
    NAN,
    Examined,
    counts,
    examine,
    examine_backward,
    leaf,
    new_session,
    operands,
    ops,
    stacks,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradtrace.capture.loss.code import LossCode
from gradtrace.capture.loss.ops import operator_of
from gradtrace.capture.loss.region import loss_region
from gradtrace.capture.loss.values import Known, Values


def test_a_cross_entropy_whose_labels_are_all_ignored_is_a_mean_of_none() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)

    found = examine(lambda x: F.cross_entropy(x, torch.tensor([-100, -100])), logits)

    (birth,) = found.forward
    assert (birth.op, birth.owner, birth.call, birth.tensor, birth.index) == (
        "NllLossBackward0",
        None,
        None,
        "output",
        0,
    )
    assert counts(birth) == (1, 0, 0)
    log_third = torch.log(torch.tensor(1 / 3)).item()
    assert operands(birth) == {"self": (pytest.approx(log_third), pytest.approx(log_third)), "target": (-100, -100)}
    assert not birth.fill
    assert birth.traceback[-1].code.startswith("found = examine(lambda x: F.cross_entropy")


@pytest.mark.parametrize(
    ("loss", "values", "op", "made"),
    [
        (lambda x: x.log().sum(), (0.0, 1.0), "LogBackward0", (0, 0, 1)),
        (lambda x: (x.log() * 0).sum(), (0.0, 1.0), "LogBackward0", (0, 0, 1)),
        (lambda x: (-1 + x).log().mean(), (0.5, 2.0), "LogBackward0", (1, 0, 0)),
        (lambda x: x.exp().sum(), (1.0, 89.0), "ExpBackward0", (0, 1, 0)),
        (lambda x: (-x).sqrt().sum(), (1.0, 4.0), "SqrtBackward0", (2, 0, 0)),
        (lambda x: (x / (x - 1)).sum(), (1.0, 2.0), "DivBackward0", (0, 1, 0)),
        (lambda x: x.sum() / torch.zeros(()), (1.0, 2.0), "DivBackward0", (0, 1, 0)),
        (lambda x: (x * torch.zeros(2)).sum() / torch.zeros(()), (1.0, 2.0), "DivBackward0", (1, 0, 0)),
        (lambda x: x[x > 5].mean(), (1.0, 2.0), "MeanBackward0", (1, 0, 0)),
        (lambda x: (x[x > 5] - 1).abs().mean(), (1.0, 2.0), "MeanBackward0", (1, 0, 0)),
        (lambda x: x.std(), (3.0,), "StdBackward0", (1, 0, 0)),
        (lambda x: (1e30 * x * 1e30).sum(), (1.0,), "MulBackward0", (0, 1, 0)),
        (lambda x: F.mse_loss(x, torch.zeros(2)), (1e30, 0.0), "MseLossBackward0", (0, 1, 0)),
        (lambda x: (x - torch.ones(2)).pow(2).mean(), (1e30, 0.0), "PowBackward0", (0, 1, 0)),
        (lambda x: (-x.clamp(min=0).log()).mean(), (-1.0, 1.0), "LogBackward0", (0, 0, 1)),
        (lambda x: x.acos().sum(), (2.0, 0.0), "AcosBackward0", (1, 0, 0)),
        (lambda x: torch.xlogy(x, -x).sum(), (1.0, 0.0), "XlogyBackward0", (1, 0, 0)),
        (lambda x: torch.stack([x[0].log(), x[1]]).sum(), (0.0, 1.0), "LogBackward0", (0, 0, 1)),
    ],
)
def test_the_operation_with_finite_operands_is_blamed(
    loss: Callable[[Tensor], Tensor], values: tuple[float, ...], op: str, made: tuple[int, int, int]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # std of one element warns
        found = examine(loss, leaf(*values))

    (birth,) = found.forward
    assert (birth.op, counts(birth)) == (op, made)
    assert found.finding is not None
    assert found.finding.reason is None


def test_a_target_too_long_for_ctc_is_an_infinite_result() -> None:
    log_probs = torch.zeros(2, 1, 3).log_softmax(-1).requires_grad_()

    found = examine(lambda x: F.ctc_loss(x, torch.tensor([[1, 1]]), torch.tensor([2]), torch.tensor([2])), log_probs)

    assert [(birth.op, counts(birth)) for birth in found.forward] == [("CtcLossBackward0", (0, 1, 0))]
    assert operands(found.forward[0])["targets"] == (1, 1)


def test_a_focal_loss_by_hand_fails_at_its_log() -> None:
    def focal(logits: Tensor) -> Tensor:
        p = torch.sigmoid(logits)
        return (-((1 - p) ** 2) * torch.log(p)).mean()

    found = examine(focal, leaf(-200.0, 0.0))  # in float32 the sigmoid of -200 is 0

    (birth,) = found.forward
    assert (birth.op, counts(birth)) == ("LogBackward0", (0, 0, 1))
    assert operands(birth) == {"self": (0.0, 0.5)}
    assert birth.traceback[-1].function == "focal"


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.tensor([1.0, 1.0])),  # clamps its log at -100
        lambda x: F.huber_loss(x, torch.zeros(2)),
        lambda x: F.kl_div(x.log_softmax(0), torch.tensor([0.0, 1.0]), reduction="sum"),
        lambda x: x.clamp(min=1e-6).log().mean(),
        lambda x: x.masked_fill(x < 0, -INF).logsumexp(0),
        lambda x: x.norm(),
    ],
)
def test_a_finite_loss_is_not_looked_into(loss: Callable[[Tensor], Tensor]) -> None:
    found = examine(loss, leaf(-200.0, 3.0))
    assert found.finding is None
    assert found.backward == []


def test_a_mask_filled_with_infinity_is_said_to_be_a_fill() -> None:
    found = examine(lambda x: x.masked_fill(torch.tensor([True, True]), -INF).logsumexp(0), leaf(1.0, 2.0))

    (birth,) = found.forward
    assert (birth.op, birth.fill, counts(birth)) == ("MaskedFillBackward0", True, (0, 0, 2))


def test_where_with_an_infinite_constant_is_a_fill() -> None:
    found = examine(lambda x: torch.where(x > 1, x, -INF).pow(2).sum(), leaf(1.0, 2.0))

    assert [(birth.op, birth.fill, counts(birth)) for birth in found.forward] == [("WhereBackward0", True, (0, 0, 1))]


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda x: F.mse_loss(x, torch.tensor([NAN, 0.0])), "operand target of MseLossBackward0"),
        (lambda x: (x * torch.tensor([INF, 0.0])).sum(), "operand other of MulBackward0"),
        (lambda x: (torch.tensor([NAN, 0.0]) * x.exp()).sum(), "operand self of MulBackward0"),
        (lambda x: (x - torch.tensor([NAN, 0.0])).abs().sum(), "operand other of SubBackward0"),
        (lambda x: (x + torch.tensor([INF, 0.0])).square().sum(), "operand other of AddBackward0"),
    ],
)
def test_a_value_that_was_bad_without_a_gradient_is_not_blamed_on_its_first_consumer(
    loss: Callable[[Tensor], Tensor], name: str
) -> None:
    found = examine(loss, leaf(1.0, 2.0))

    assert found.forward == []
    assert found.finding is not None
    assert found.finding.reason is not None
    assert found.finding.reason.startswith(name)
    assert "non-finite already" in found.finding.reason
    assert found.finding.place[-1].line > 0


def test_a_sum_that_overflows_with_an_unseen_constant_is_blamed() -> None:
    largest = torch.finfo(torch.float32).max
    found = examine(lambda x: (x + torch.full((2,), largest)).abs().sum(), leaf(largest, 0.0))
    assert ops(found.forward) == ["AddBackward0"]


def test_what_is_bad_when_the_model_returns_it_is_nobody_s_fault_in_the_loss() -> None:
    found = examine(lambda x: (x.exp() * 2).sum(), leaf(NAN, 0.0))
    assert found.finding is not None
    assert (found.finding.births, found.finding.reason) == ([], None)


def test_the_caller_knows_what_no_node_has_kept() -> None:
    def examined(*, caller_knows: bool) -> Examined:
        output = torch.tensor([3.0, 0.0], requires_grad=True) * 1
        edge = (output.grad_fn, output.output_nr)
        with stacks():
            loss = (output / torch.tensor([1.0, 0.0])).mean()
        values = {edge: Known(output)} if caller_knows else {}
        start = edge[0]._sequence_nr()
        return examine_backward([loss], [], inside=[(start, start + 1)], known=lambda e: values.get(e, Known()))

    without, with_output = examined(caller_knows=False), examined(caller_knows=True)

    assert without.finding is not None
    assert (without.finding.births, without.finding.reason) == (
        [],
        "MeanBackward0 is the first operation whose result is known to be non-finite; what it was given is not",
    )
    assert [(birth.op, counts(birth)) for birth in with_output.forward] == [("DivBackward0", (1, 0, 0))]
    assert operands(with_output.forward[0]) == {"self": (0.0, 3.0), "other": (0.0, 1.0)}


def test_an_output_that_was_changed_in_place_since_is_not_taken_for_what_it_was() -> None:
    output = torch.tensor([3.0, 1.0], requires_grad=True) * 1
    edge = (output.grad_fn, output.output_nr)
    values = Values([], [], lambda edge: Known(output), lambda tensor: True)
    before = values.value(edge)
    output.div_(torch.zeros(2))
    assert before is not None
    assert values.value(edge) is None


def test_tensors_that_the_user_s_hooks_keep_are_left_alone() -> None:
    unpacked = []
    x = leaf(0.0, 1.0)
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: unpacked.append(1) or tensor):
        loss = x.log().sum()
    plain = leaf(0.0, 1.0)
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: unpacked.append(2) or tensor):
        plain.log().sum().backward()

    found = examine_backward([loss], [x])

    assert unpacked.count(1) == unpacked.count(2) == 1
    assert torch.equal(x.grad, plain.grad)
    # The value of a leaf is there all the same.
    assert ops(found.forward) == ["LogBackward0"]


def test_dropout_is_never_run_again_and_no_random_number_is_drawn() -> None:
    x = leaf(1.0, 0.0)
    with stacks():
        loss = (F.dropout(x * 2, 0.5) + x.log()).sum()
    before = torch.get_rng_state()

    found = examine_backward([loss], [x])

    assert torch.equal(torch.get_rng_state(), before)
    assert ops(found.forward) == ["LogBackward0"]


def test_looking_leaves_gradients_versions_and_values_as_they_are() -> None:
    def loss_of(x: Tensor) -> Tensor:
        y = x.exp()
        return (y / (y - 1)).sum() + (x * 2).mul_(3).norm()

    plain, watched = leaf(0.0, 2.0, -1.0), leaf(0.0, 2.0, -1.0)
    loss_of(plain).backward()
    found = examine(loss_of, watched)

    assert ops(found.forward) == ["DivBackward0"]
    assert torch.equal(plain.grad.view(torch.int32), watched.grad.view(torch.int32))  # NaN is no equal of NaN
    assert watched._version == plain._version


def test_the_second_run_is_in_the_type_of_the_first_whatever_autocast_says() -> None:
    x = torch.tensor([[1e30, 1.0]], requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (x @ torch.full((2, 1), 1e10)).mean()  # 1e40 is too large for both types

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = examine(loss, x)
    with stacks():
        outside = loss(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around_backward = examine_backward([outside], [x])

    assert [(birth.op, birth.result.dtype) for birth in inside.forward] == [("MmBackward0", torch.bfloat16)]
    assert [(birth.op, birth.result.dtype) for birth in around_backward.forward] == [("MmBackward0", torch.float32)]


def test_the_second_run_warns_of_nothing() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    with stacks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = x.var(correction=1).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the variance of one element warns
        found = examine_backward([loss], [x])
    assert ops(found.forward) == ["VarBackward0"]


def test_what_a_selection_has_left_out_is_not_reported() -> None:
    found = examine(lambda x: torch.where(x > 0, x.log(), 0.0).sum() + (x.sum() - 3).log(), leaf(0.0, 3.0))
    # Both logs meet a zero; only the second one comes to the loss.
    assert [(birth.op, birth.result.shape) for birth in found.forward] == [("LogBackward0", torch.Size([]))]


@pytest.mark.parametrize(
    ("loss", "op", "maker"),
    [
        (lambda x: (x - 1).sqrt().sum(), "SqrtBackward0", "SubBackward0"),
        (lambda x: (1 / (x - 1)).exp().sum(), "ReciprocalBackward0", "SubBackward0"),
        (lambda x: x.masked_fill(x < 9, -INF).softmax(0).sum(), "SoftmaxBackward0", "MaskedFillBackward0"),
    ],
)
def test_a_constant_that_nobody_has_kept_leaves_a_doubt_that_is_said(
    loss: Callable[[Tensor], Tensor], op: str, maker: str
) -> None:
    found = examine(loss, leaf(0.0, 1.0))
    assert ops(found.forward) == [op]
    assert found.finding is not None
    assert found.finding.reason == (
        f"operand self of {op} is not known: {maker} made it of finite values and a constant"
    )


def test_a_sum_is_not_blamed_for_an_infinity_that_an_assignment_has_put_there() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        y[x > 0.5] = INF
        return y.sum()

    found = examine(loss, leaf(0.0, 1.0))

    assert found.finding is not None
    assert (found.finding.births, found.finding.reason) == (
        [],
        "SumBackward0 is the first operation whose result is known to be non-finite; what it was given is not",
    )


def test_an_infinity_that_an_assignment_has_put_there_is_a_fill() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        y[x > 0.5] = INF
        return y.pow(2).sum()

    found = examine(loss, leaf(0.0, 1.0))

    assert [(birth.op, birth.fill, counts(birth)) for birth in found.forward] == [
        ("IndexPutBackward0", True, (0, 1, 0))
    ]


def test_several_operations_that_fail_are_reported_in_the_order_in_which_they_ran() -> None:
    found = examine(lambda x: x.log().sum() + (1 / x).sum() + (x - 1).sqrt().sum(), leaf(0.0, 3.0))
    assert ops(found.forward) == ["LogBackward0", "ReciprocalBackward0", "SqrtBackward0"]


def test_what_is_said_of_a_bad_label_gives_way_to_an_operation_that_failed() -> None:
    found = examine(lambda x: F.mse_loss(x, torch.tensor([NAN, 0.0])) + x.log().sum(), leaf(0.0, 1.0))
    assert ops(found.forward) == ["LogBackward0"]
    assert found.finding is not None
    assert found.finding.reason is None
    assert found.finding.term is not None
    assert "MseLossBackward0" in found.finding.term
    assert "SumBackward0" in found.finding.term


def test_a_long_chain_is_no_trouble() -> None:
    def loss(x: Tensor) -> Tensor:
        total = x.log()
        for _ in range(3000):
            total = total + x
        return total.sum()

    found = examine(loss, leaf(0.0, 1.0))

    assert ops(found.forward) == ["LogBackward0"]
    assert dict(found.session.unmeasured) == {}


def test_no_more_is_computed_than_a_step_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.capture.loss.values._MOST_COMPUTED", 3)
    found = examine(lambda x: x.log().mean(), leaf(0.0, 1.0, 2.0, 3.0))
    assert found.finding is not None
    assert found.finding.reason is not None
    assert found.finding.reason.startswith("MeanBackward0 is the first operation whose result is known")


def test_tensors_of_other_kinds_are_never_computed_with() -> None:
    class Distributed(Tensor):  # its operations may wait for other ranks
        pass

    factor = torch.tensor([0.0, 1.0]).as_subclass(Distributed)
    with torch._C.DisableTorchFunctionSubclass():
        result = leaf(1.0, 2.0) * factor
    assert isinstance(result.grad_fn._saved_other, Distributed)
    values = Values([result.grad_fn], [], lambda edge: Known(), lambda tensor: True)
    assert values.value((result.grad_fn, 0)) is None


@pytest.mark.parametrize("name", ["NativeDropoutBackward0", "RreluWithNoiseBackward0", "BernoulliBackward0"])
def test_an_operator_that_draws_random_numbers_is_none_that_could_be_run_again(name: str) -> None:
    assert operator_of(name, 1, {"p": 0.5, "train": True, "lower": 0.1, "upper": 0.3, "training": True}) is None
    assert operator_of("LogBackward0", 1, {}) is not None


def test_without_explain_only_the_backward_pass_is_looked_at() -> None:
    session = new_session()
    code = LossCode(session)
    loss = leaf(0.0, 1.0).log().sum()
    assert code.backward_begins([loss], [], explain=False) is None
    loss.backward()
    code.backward_ended()
    assert ops(code.births()) == ["LogBackward0"]


X = torch.tensor([[0.5, 1.5, 2.5], [3.0, 0.25, 1.0]])
Y = torch.tensor([[1.0, 0.5, 2.0], [0.75, 4.0, 1.25]])
RUN_AGAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x.add(y, alpha=3),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "mul by a constant": lambda x, y: x * 0.3,
    "div": lambda x, y: x / y,
    "div with rounding": lambda x, y: x.div(y, rounding_mode="floor"),
    "pow": lambda x, y: x**y,
    "pow of a number": lambda x, y: x**3,
    "pow to a number": lambda x, y: 3**x,
    "log": lambda x, y: x.log(),
    "log1p": lambda x, y: x.log1p(),
    "abs": lambda x, y: (-x).abs(),
    "sum": lambda x, y: x.sum(),
    "sum of one axis": lambda x, y: x.sum(-1, keepdim=True),
    "sum in another type": lambda x, y: x.sum(0, dtype=torch.float64),
    "mean": lambda x, y: x.mean(),
    "mean of one axis": lambda x, y: x.mean(-2),
    "to another type": lambda x, y: x.half(),
    "largest of one axis": lambda x, y: x.max(-1).values,
    "largest": lambda x, y: x.amax(-1),
    "clamp": lambda x, y: x.clamp(0.4, 2.0),
    "clamp to a tensor": lambda x, y: x.clamp(min=y),
    "stack": lambda x, y: torch.stack([x, y, x], -1),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "view": lambda x, y: x.view(3, 2),
    "expand": lambda x, y: x[None].expand(2, 2, 3),
    "select": lambda x, y: x[:, -1],
    "slice": lambda x, y: x[:, ::2],
    "index": lambda x, y: x[:, torch.tensor([2, 0])],
    "mask": lambda x, y: x[x > 1],
    "gather": lambda x, y: x.gather(1, torch.tensor([[0], [2]])),
    "where": lambda x, y: torch.where(x > 1, x, y),
    "cumsum": lambda x, y: x.cumsum(-1),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "norm": lambda x, y: x.norm(dim=-1),
    "var": lambda x, y: x.var(-1, correction=0),
    "mm": lambda x, y: x @ y.T,
    "bmm": lambda x, y: x[None] @ y.T[None],
    "xlogy": lambda x, y: torch.xlogy(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "softplus": lambda x, y: F.softplus(x, beta=2.0),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "relu in place": lambda x, y: (x - 1).relu_(),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.7),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3, reduction="none"),
    "bce": lambda x, y: F.binary_cross_entropy(x / 5, (y > 1).float(), weight=y.detach()),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y / 5, pos_weight=torch.tensor([1.0, 2, 3])),
    "nll": lambda x, y: F.nll_loss(x, torch.tensor([1, 2]), weight=torch.tensor([1.0, 2, 3])),
    "nll of images": lambda x, y: F.nll_loss(x[:, :, None], torch.tensor([[1], [2]]), ignore_index=2),
    "cdist": lambda x, y: torch.cdist(x, y),
}


@pytest.mark.parametrize("name", RUN_AGAIN)
def test_an_operation_that_is_run_again_gives_the_same_bits(name: str) -> None:
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    result = RUN_AGAIN[name](x, y)

    nodes = loss_region([result], [])
    assert nodes is not None
    values = Values(nodes, [], lambda edge: Known(), lambda tensor: True)
    again = values.value((result.grad_fn, result.output_nr))

    assert again is not None
    assert again.dtype == result.dtype
    assert torch.equal(again, result)
    assert not again.requires_grad


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.rrelu(x, training=True),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        lambda x: x.masked_fill(x > 1, 7.0),
        lambda x: 1 - x,
    ],
)
def test_what_is_random_or_not_all_kept_is_not_run_again(loss: Callable[[Tensor], Tensor]) -> None:
    result = loss(X.clone().requires_grad_())
    nodes = loss_region([result], [])
    assert nodes is not None
    values = Values(nodes, [], lambda edge: Known(), lambda tensor: True)
    state = torch.get_rng_state()
    again = values.value((result.grad_fn, result.output_nr))
    assert torch.equal(torch.get_rng_state(), state)
    assert again is None
