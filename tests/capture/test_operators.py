"""Which operation of a forward pass made the first non-finite value, and where that value went."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrace.capture.names import ModuleEntry, Names
from gradtrace.capture.operations.births import MOST, Birth
from gradtrace.capture.operations.frames import user_lines
from gradtrace.capture.operations.guards import Communicates, Guard, Memory, Refused, WritesOutside
from gradtrace.capture.operations.operators import ForwardOps

INF, NAN = math.inf, math.nan


def births_of(function: Callable[[], Any], *, outside: Iterable[Tensor] = ()) -> list[Birth]:
    """Run ``function`` and return what was born."""
    with ForwardOps(Memory(outside), lambda: None) as ops:
        function()
    return ops.births


def only_birth(function: Callable[[], Any]) -> Birth:
    (birth,) = births_of(function)
    return birth


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def entry_of(module: nn.Module) -> ModuleEntry:
    names = Names((), ())
    names.add_root(module, "Model")
    entry = names.entry(module)
    assert entry is not None
    return entry


ENTRY = entry_of(nn.Identity())


def reaches(function: Callable[[], Tensor]) -> list[list[str]]:
    """Return for each birth the paths of the outputs of a module call that it reached."""
    with ForwardOps(Memory(), lambda: (ENTRY, 0)) as ops:
        ops.leaves(ENTRY, 0, [("0", function())])
    for birth in ops.births:
        assert all((entry, call) == (ENTRY, 0) for entry, call, _ in birth.flows_to)
    return [[path for _, _, path in birth.flows_to] for birth in ops.births]


# The name, the result and the operands ------------------------------------------------------------------------

HALF = torch.float16

MAKERS: dict[str, tuple[Callable[[], Tensor], str, tuple[int, int, int], list[tuple[str, float | None, float | None]]]]
MAKERS = {
    "division": (lambda: leaf(0, 1) / leaf(0, 2), "DivBackward0", (1, 0, 0), [("self", 0, 1), ("other", 0, 2)]),
    "division by a number": (lambda: leaf(1, -2) / 0.0, "DivBackward0", (0, 1, 1), [("self", -2, 1), ("other", 0, 0)]),
    "log": (lambda: leaf(-1, 4).log(), "LogBackward0", (1, 0, 0), [("self", -1, 4)]),
    "log of zero": (lambda: leaf(0, 4).log(), "LogBackward0", (0, 0, 1), [("self", 0, 4)]),
    "exp": (lambda: leaf(710, 1).exp(), "ExpBackward0", (0, 1, 0), [("self", 1, 710)]),
    "sqrt": (lambda: leaf(-1, 9).sqrt(), "SqrtBackward0", (1, 0, 0), [("self", -1, 9)]),
    "pow": (lambda: leaf(0, 2).pow(-1), "PowBackward0", (0, 1, 0), [("self", 0, 2), ("exponent", -1, -1)]),
    "var of one": (
        lambda: leaf(3).var(correction=1),
        "VarBackward0",
        (1, 0, 0),
        [("self", 3, 3)],
    ),
    "sum in half": (
        lambda: leaf(6e4, dtype=HALF) + leaf(5e4, dtype=HALF),
        "AddBackward0",
        (0, 1, 0),
        [("self", 6e4, 6e4), ("other", 49984, 49984)],  # 5e4 in float16
    ),
    "product in half": (
        lambda: leaf(512, 512, dtype=HALF).view(1, 2) @ leaf(128, 128, dtype=HALF).view(2, 1),
        "MmBackward0",
        (0, 1, 0),
        [("self", 512, 512), ("mat2", 128, 128)],
    ),
    "conversion": (lambda: leaf(1e5, 1).half(), "ToCopyBackward0", (0, 1, 0), [("self", 1, 1e5)]),
    "mean of nothing": (lambda: leaf().mean(), "MeanBackward0", (1, 0, 0), [("self", None, None)]),
    "labels that are all ignored": (
        lambda: nn.functional.nll_loss(leaf(1, 2).view(1, 2), torch.tensor([-100])),
        "NllLossBackward0",
        (1, 0, 0),
        [("self", 1, 2), ("target", -100, -100)],
    ),
    "in place": (lambda: (leaf(-1, 4) * 1).log_(), "LogBackward0", (1, 0, 0), [("self", -1, 4)]),
    "acos": (lambda: leaf(2, 0).acos(), "AcosBackward0", (1, 0, 0), [("self", 0, 2)]),
}


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("case", MAKERS)
def test_a_birth_has_the_name_of_the_node_the_counts_of_the_result_and_the_operands(case: str) -> None:
    make, op, counts, operands = MAKERS[case]
    birth = only_birth(make)
    assert birth.op == op
    assert (birth.result.nan, birth.result.posinf, birth.result.neginf) == counts
    found = [(o.tensor, o.path, o.measure.min, o.measure.max) for o in birth.operands]
    assert found == [("input", *operand) for operand in operands]
    assert (birth.tensor, birth.index, birth.fill) == ("output", 0, False)


@pytest.mark.parametrize("case", MAKERS)
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
def test_without_grad_mode_a_birth_has_the_name_of_the_operation(case: str) -> None:
    make, op, _, _ = MAKERS[case]
    with torch.no_grad():
        birth = only_birth(make)
    assert birth.op.startswith("aten.")
    assert birth.op != op


def test_finite_operations_are_no_births() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    assert births_of(lambda: model(torch.randn(5, 3)).square().mean()) == []


def test_an_operation_that_passes_on_what_it_got_is_no_birth() -> None:
    def chain() -> None:
        (leaf(-1.0).log() * 2 + 1).exp().sum()

    assert only_birth(chain).op == "LogBackward0"


def test_two_origins_are_two_births_in_order_of_execution() -> None:
    def both() -> None:
        leaf(-1.0).log() + leaf(1000.0).exp()

    assert [birth.op for birth in births_of(both)] == ["LogBackward0", "ExpBackward0"]


def test_the_second_result_of_an_operation_has_its_number() -> None:
    # The exponent of an infinite number is 0 and its mantissa infinite; that of log of zero is no birth.
    birth = only_birth(lambda: torch.std_mean(torch.tensor([1e4, 6e4, 6e4], dtype=torch.float64).exp()))
    assert birth.op == "aten.exp"
    birth = only_birth(lambda: torch.linalg.slogdet(torch.zeros(2, 2)))
    assert (birth.op, birth.index) == ("aten._linalg_slogdet", 1)  # the sign is 0, its logarithm -Inf
    assert birth.result.neginf == 1


def test_views_make_nothing_and_their_values_belong_to_whoever_wrote_the_memory() -> None:
    def through_views() -> Tensor:
        bad = leaf(-1, 1, 4, 9).log().view(2, 2).t().expand(3, 2, 2)
        return bad.reshape(-1)[:4].unsqueeze(0).detach() * 2

    assert [birth.op for birth in births_of(through_views)] == ["LogBackward0"]
    assert reaches(through_views) == [["0"]]


def test_a_node_of_a_custom_function_is_not_the_maker_its_kernel_is() -> None:
    class Logs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.log()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    birth = only_birth(lambda: Logs.apply(leaf(-1)))
    assert birth.op == "aten.log"
    assert birth.traceback[-1].code == "return value.log()"
    assert birth.traceback[-1].function == "forward"


def test_operands_that_are_overwritten_are_shown_as_they_were() -> None:
    birth = only_birth(lambda: leaf(1, 2).mul(1).div_(torch.tensor([0.0, 1.0])))
    assert [(o.path, o.measure.min, o.measure.max, o.measure.nan) for o in birth.operands] == [
        ("self", 1, 2, 0),
        ("other", 0, 1, 0),
    ]
    assert (birth.result.posinf, birth.result.max) == (1, 2)


def test_memory_that_nobody_wrote_is_a_birth_when_it_is_read() -> None:
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        with torch.no_grad():
            births = births_of(lambda: (torch.empty(2).fill_(1.0) + 1, torch.empty(3) + 1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [(birth.op, birth.result.nan, birth.fill) for birth in births] == [("aten.empty", 3, False)]
    assert births[0].traceback[-1].function == "<lambda>"


def test_only_the_first_births_are_kept_and_the_others_counted() -> None:
    with ForwardOps(Memory(), lambda: None) as ops:
        results = [leaf(-1.0).log() for _ in range(MOST + 7)]
        ops.leaves(ENTRY, 0, [("0", results[-1]), ("1", results[0])])
    assert (len(ops.births), ops.left_out) == (MOST, 7)
    assert [path for _, _, path in ops.births[0].flows_to] == ["1"]


# Where a value goes -------------------------------------------------------------------------------------------


def masked_assignment() -> Tensor:
    out = torch.zeros(4)
    mask = torch.tensor([True, False, True, False])
    out[mask] = leaf(0, 1) / leaf(0, 1)
    return out


def slice_assignment() -> Tensor:
    out = torch.zeros(2, 3)
    out[1] = leaf(-1, 1, 2).log()
    return out


def out_variant() -> Tensor:
    with torch.no_grad():
        out = torch.zeros(2)
        torch.log(torch.tensor([-1.0, 1.0]), out=out)
    return out


def added_in_place() -> Tensor:
    return torch.zeros(3).add_(leaf(-1, 1, 2).log().detach())


def copied() -> Tensor:
    return torch.zeros(3).copy_(leaf(-1, 1, 2).log())


@pytest.mark.parametrize("write", [masked_assignment, slice_assignment, out_variant, added_in_place, copied])
def test_a_value_is_followed_into_memory_that_was_made_before(write: Callable[[], Tensor]) -> None:
    assert reaches(write) == [["0"]]
    assert reaches(lambda: write() * 2) == [["0"]]


def repaired_in_place() -> Tensor:
    out = leaf(-1, 1).log().detach()
    out[out.isnan()] = 0.0
    return out


def repaired_half() -> Tensor:
    out = torch.cat([leaf(-1, 1).log(), leaf(-1, 1).log()]).detach()
    out[:2] = 0.0
    return out


def test_memory_holds_the_values_of_all_who_wrote_into_it() -> None:
    def rows() -> Tensor:
        out = torch.zeros(2, 3)
        out[0] = leaf(-1, 1, 2).log()
        out[1] = leaf(-1, 1, 2).sqrt()
        return out

    assert reaches(rows) == [["0"], ["0"]]


def test_a_value_that_is_overwritten_goes_nowhere() -> None:
    assert reaches(repaired_in_place) == [[]]
    assert reaches(lambda: leaf(-1, 1).log().nan_to_num()) == [[]]
    assert reaches(lambda: leaf(-1, 1).log().relu().nan_to_num() + 1) == [[]]


def test_memory_that_is_repaired_in_part_still_holds_the_rest() -> None:
    assert reaches(repaired_half) == [["0"], ["0"]]


def test_memory_that_was_repaired_and_goes_bad_again_has_the_new_origin_only() -> None:
    def again() -> Tensor:
        out = leaf(-1, 1).log().detach()
        out.zero_()
        return out.sub_(1).sqrt_()

    assert reaches(again) == [[], ["0"]]


def test_a_finite_view_of_bad_memory_brings_nothing_along() -> None:
    def other_row() -> Tensor:
        out = torch.zeros(2, 3)
        out[0] = leaf(-1, 1, 2).log()
        return out[1] * leaf(1, 1, 1)

    assert reaches(other_row) == [[]]


def test_outputs_of_nested_calls_are_listed_in_order() -> None:
    with ForwardOps(Memory(), lambda: None) as ops:
        bad = leaf(-1.0).log()
        ops.leaves(ENTRY, 0, [("loss", bad), ("logits", torch.ones(2))])
        ops.leaves(ENTRY, 1, [("0", bad * 2)])
    ops.leaves(ENTRY, 2, [("0", bad.detach())])
    assert ops.births[0].flows_to == [(ENTRY, 0, "loss"), (ENTRY, 1, "0"), (ENTRY, 2, "0")]


def test_the_innermost_module_call_owns_a_birth() -> None:
    with ForwardOps(Memory(), lambda: (ENTRY, 3)) as ops:
        leaf(-1.0).log()
    assert (ops.births[0].owner, ops.births[0].call) == (ENTRY, 3)


# Constants ----------------------------------------------------------------------------------------------------

VALID = torch.tensor([[True, False], [True, True]])
NOTHING = torch.zeros(2, 2, dtype=torch.bool)
SCORES = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

FILLS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "masked_fill": (lambda x: x.masked_fill(~VALID, -INF), ["MaskedFillBackward0"]),
    "masked_fill in place": (lambda x: (x * 1).masked_fill_(~VALID, -INF), ["MaskedFillBackward0"]),
    "where a number": (lambda x: torch.where(VALID, x, -INF), ["aten.scalar_tensor", "WhereBackward0"]),
    "where a tensor": (lambda x: torch.where(VALID, x, torch.tensor(-INF)), ["aten.lift_fresh", "WhereBackward0"]),
    "fill a constant": (
        lambda x: x.masked_fill(~VALID, torch.tensor(-INF)),
        ["aten.lift_fresh", "MaskedFillBackward1"],
    ),
    "a mask that is added": (lambda x: x + torch.zeros(2, 2).masked_fill(~VALID, -INF), ["aten.masked_fill"]),
    "full": (lambda x: x + torch.full((2, 2), -INF).triu(1), ["aten.full"]),
    "triangle": (lambda x: x + torch.triu(torch.ones(2, 2) * -INF, 1), ["aten.mul"]),
    "numbers": (lambda x: x + torch.tensor([[0.0, -INF], [0.0, 0.0]]), ["aten.lift_fresh"]),
    "padding": (lambda x: nn.functional.pad(x[:, :1], (0, 1), value=-INF), ["ConstantPadNdBackward0"]),
    "assignment": (lambda x: _assigned(x), ["aten.lift_fresh", "aten.copy_"]),
    "assignment by mask": (lambda x: _assigned_by_mask(x), ["aten.lift_fresh", "IndexPutBackward0"]),
}


def _assigned(scores: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros(2, 2)
        mask[0, 1] = -INF
    return scores + mask


def _assigned_by_mask(scores: Tensor) -> Tensor:
    scores = scores * 1
    scores[~VALID] = -INF
    return scores


@pytest.mark.parametrize("case", FILLS)
def test_a_constant_that_the_code_gives_is_a_fill_and_healthy_softmax_no_birth(case: str) -> None:
    make, ops = FILLS[case]
    scores = SCORES.clone().requires_grad_()
    births = births_of(lambda: make(scores).softmax(-1))
    assert [birth.op for birth in births] == ops
    assert all(birth.fill for birth in births)
    assert births[-1].result.nan == births[-1].result.posinf == 0


@pytest.mark.parametrize(
    ("make", "op", "last"),
    [
        (lambda x: x.masked_fill(~NOTHING, -INF).softmax(-1), "SoftmaxBackward0", 4),
        (lambda x: x.masked_fill(~VALID, -INF) * torch.zeros(2, 2), "MulBackward0", 1),
        (lambda x: x.masked_fill(~VALID, -INF) - x.masked_fill(~VALID, -INF), "SubBackward0", 1),
        (lambda x: (x + torch.tensor([-INF, 0.0])) @ torch.zeros(2, 1), "MmBackward0", 2),
    ],
)
def test_nan_made_of_filled_infinities_is_a_birth_of_its_own(
    make: Callable[[Tensor], Tensor], op: str, last: int
) -> None:
    births = births_of(lambda: make(SCORES.clone().requires_grad_()))
    assert all(birth.fill for birth in births[:-1])
    assert (births[-1].op, births[-1].fill, births[-1].result.nan) == (op, False, last)


def test_a_fill_flows_on_as_any_other_value() -> None:
    assert reaches(lambda: leaf(1, 2).masked_fill(torch.tensor([True, False]), -INF) + 1) == [["0"]]
    assert reaches(lambda: leaf(1, 2).masked_fill(torch.tensor([True, False]), -INF).softmax(-1)) == [[]]


def test_a_mask_of_logarithms_is_harmless_until_a_row_is_masked_throughout() -> None:
    def attend(valid: list[list[float]]) -> list[str]:
        return [b.op for b in births_of(lambda: (SCORES + torch.tensor(valid).log()).softmax(-1))]

    assert attend([[1, 0], [1, 1]]) == ["aten.log"]
    assert attend([[0, 0], [1, 1]]) == ["aten.log", "aten._softmax"]


def test_an_overflow_is_no_mask_and_what_comes_of_it_no_birth() -> None:
    def attend() -> None:
        (torch.tensor([[6e4, 3e4, 2e4]], dtype=HALF, requires_grad=True) * 2).softmax(-1) - 1

    assert [(birth.op, birth.fill) for birth in births_of(attend)] == [("MulBackward0", False)]


def test_a_mask_from_outside_makes_no_birth_unless_nan_is_made_of_it() -> None:
    mask = torch.tensor([[0.0, -INF], [0.0, 0.0]])
    assert births_of(lambda: (SCORES + mask).softmax(-1)) == []
    nothing = torch.full((2, 2), -INF)
    birth = only_birth(lambda: (SCORES + nothing).softmax(-1))
    assert (birth.op, birth.result.nan) == ("aten._softmax", 4)


def test_what_is_nan_outside_already_is_no_birth_anywhere() -> None:
    bad = torch.tensor([1.0, NAN])
    assert births_of(lambda: (bad * 2).exp().sum() - bad) == []


def test_an_infinite_constant_of_the_model_that_is_filled_in_is_a_fill() -> None:
    constant = torch.tensor(-INF)
    birth = only_birth(lambda: SCORES.masked_fill(~VALID, constant))
    assert (birth.op, birth.fill, birth.result.neginf) == ("aten.masked_fill", True, 1)


# Whole models -------------------------------------------------------------------------------------------------


def test_attention_over_nothing_is_made_by_softmax() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    tokens, padding = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [True, True, True]])
    births = births_of(lambda: attention(tokens, tokens, tokens, key_padding_mask=padding))
    assert [birth.op for birth in births if not birth.fill] == ["SoftmaxBackward0"]
    assert births[-1].result.nan == 2 * 3 * 3  # two heads, three queries, three keys of the second sequence
    healthy = births_of(lambda: attention(tokens, tokens, tokens, key_padding_mask=padding[:1].expand(2, 3)))
    assert all(birth.fill for birth in healthy)


def test_half_precision_under_autocast_is_made_by_the_product() -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 300.0)
    with torch.autocast("cpu", dtype=torch.float16):
        births = births_of(lambda: layer(torch.full((1, 2), 300.0)).float().log_softmax(-1))
    assert [birth.op for birth in births] == ["MmBackward0"]
    assert [(o.measure.dtype, o.measure.max) for o in births[0].operands] == [(HALF, 300), (HALF, 300)]


def test_the_pass_is_the_same_as_without_it() -> None:
    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 2)
        )
        return model(torch.randn(4, 6)).log_softmax(-1), torch.rand(3)

    plain = run()
    with ForwardOps(Memory(), lambda: None):
        watched = run()
    assert all(torch.equal(left, right) for left, right in zip(plain, watched, strict=True))


class Shadow(Tensor):
    """A tensor that runs every operation on another one, as distributed tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Shadow:
        shadow: Shadow = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        shadow.inner = inner
        return shadow

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Shadow) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


def test_the_operations_inside_of_a_subclass_are_seen() -> None:
    shadow = Shadow(torch.tensor([-1.0, 1.0]))
    assert only_birth(lambda: shadow.log() + 1).op == "aten.log"


def test_operations_below_a_users_own_mode_are_seen() -> None:
    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def run() -> None:
        with Doubles():
            torch.tensor([-1.0]).log()

    assert only_birth(run).op == "aten.log"


# Where in the code --------------------------------------------------------------------------------------------


class Logarithm(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return nn.functional.softplus(value.log())


def runs_it(model: nn.Module) -> list[Birth]:
    with ForwardOps(Memory(), lambda: None, base=sys._getframe().f_code) as ops:
        model(leaf(-1.0))
    return ops.births


def test_the_traceback_has_the_users_frames_inside_of_the_replay() -> None:
    (birth,) = runs_it(nn.Sequential(Logarithm()))
    (line,) = birth.traceback
    assert line.file == __file__
    assert line.line == Logarithm.forward.__code__.co_firstlineno + 1
    assert (line.function, line.code) == ("forward", "return nn.functional.softplus(value.log())")
    assert birth.where == (__file__, line.line)


def test_without_a_base_all_frames_of_the_user_are_there() -> None:
    functions = [line.function for line in user_lines()]
    assert functions[-1] == "test_without_a_base_all_frames_of_the_user_are_there"
    assert len(functions) > 1


# What is refused ----------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Guard, lambda memory: ForwardOps(memory, lambda: None)])
@pytest.mark.parametrize(
    "communicate",
    [
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.broadcast(torch.ones(2), 0),
        lambda: dist.all_gather_object([None], "word"),
        lambda: dist.isend(torch.ones(2), 0),
        lambda: dist.barrier(),
        lambda: dist._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD),
    ],
)
def test_communication_is_refused_before_it_happens(
    kind: Callable[[Memory], Guard], communicate: Callable[[], Any], alone: None
) -> None:
    memory = Memory()
    with kind(memory), pytest.raises(Communicates, match=r"^the forward communicates \(.*test_operators.py:\d+\)$"):
        communicate()
    assert isinstance(memory.refusal, Communicates)


def test_communication_in_backward_is_said_to_be_there(alone: None) -> None:
    with Guard(Memory(), part="backward"), pytest.raises(Communicates, match=r"^the backward communicates"):
        dist.all_reduce(torch.ones(2))


OUTSIDE = torch.ones(4)
WEIGHTS = nn.Embedding(3, 2, max_norm=0.1)
NORM = nn.BatchNorm1d(2)

WRITES: dict[str, Callable[[], Any]] = {
    "in place": lambda: OUTSIDE.add_(1),
    "through a view": lambda: OUTSIDE.view(2, 2)[0].zero_(),
    "assignment": lambda: OUTSIDE.__setitem__(0, 2.0),
    "out=": lambda: torch.exp(torch.ones(4), out=OUTSIDE),
    "a list": lambda: torch._foreach_mul_([torch.ones(2), OUTSIDE], 2.0),
    "data": lambda: WEIGHTS.weight.data.mul_(2),
    "renormalisation": lambda: WEIGHTS(torch.tensor([1])),
    "statistics": lambda: nn.functional.batch_norm(
        torch.randn(3, 2), NORM.running_mean, NORM.running_var, training=True
    ),
    "memory of numpy's": lambda: torch.from_numpy(np.ones(3)).add_(1),
    "without a copy": lambda: OUTSIDE.contiguous().detach().add_(1),
}


@pytest.mark.parametrize("case", WRITES)
def test_writing_into_memory_from_before_is_refused_before_it_happens(case: str) -> None:
    before = [OUTSIDE.clone(), WEIGHTS.weight.detach().clone(), NORM.running_mean.clone()]
    words = r"^an operation writes into memory from before the replay: aten\..*, test_operators.py:\d+$"
    memory = Memory()
    with Guard(memory), pytest.raises(WritesOutside, match=words):
        WRITES[case]()
    after = [OUTSIDE, WEIGHTS.weight, NORM.running_mean]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert isinstance(memory.refusal, WritesOutside)


@pytest.mark.parametrize(
    "write",
    [
        lambda: OUTSIDE.clone().add_(1),
        lambda: torch.zeros(2, 2)[0].fill_(3),
        lambda: torch.tensor([1.0, 2.0]).mul_(2),
        lambda: torch.exp(OUTSIDE, out=torch.empty(4)),
        lambda: nn.functional.relu(OUTSIDE * 2, inplace=True),
        lambda: nn.functional.batch_norm(torch.randn(3, 2), torch.zeros(2), torch.ones(2), training=True),
        lambda: nn.functional.batch_norm(torch.randn(3, 2), NORM.running_mean, NORM.running_var),
        lambda: nn.functional.dropout(OUTSIDE, 0.5),
        lambda: nn.LSTM(2, 3, 2, dropout=0.5)(torch.randn(3, 1, 2)),
        lambda: OUTSIDE.sum().item(),
    ],
)
def test_writing_into_memory_of_the_replay_is_allowed(write: Callable[[], Any]) -> None:
    memory = Memory()
    with Guard(memory):
        write()
    assert memory.refusal is None


def test_the_given_buffers_may_be_written() -> None:
    buffers = [torch.zeros(2), torch.ones(2)]
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    with Guard(Memory(buffers)):
        nn.functional.batch_norm(rows, buffers[0], buffers[1], training=True, momentum=0.5)
    assert buffers[0].tolist() == [1.0, 2.0]  # half of the means 2 and 4
    assert buffers[1].tolist() == [1.5, 4.5]  # half of 1, and of the variances 2 and 8


def test_a_refusal_that_the_user_swallows_is_known() -> None:
    memory = Memory()
    with Guard(memory):
        for _ in range(2):
            try:
                OUTSIDE.add_(1)
            except Refused:
                OUTSIDE.mul(1)
    assert str(memory.refusal).startswith("an operation writes into memory from before the replay: aten.add_, self")
    assert OUTSIDE.tolist() == [1, 1, 1, 1]
