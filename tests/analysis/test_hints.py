"""What is said to be the usual cause and mend, operation by operation; its names are held against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtrace.analysis.births import Birth, op_name, read_births
from gradtrace.analysis.hints import OP_HINTS, hints_for
from gradtrace.analysis.verdict_model import Cause, Finding
from gradtrace.trace.schema import Record
from tests.analysis.rows import INF, NAN, NEGINF, Rows


def _finding(cause: Cause = Cause.MODULE, made: dict[str, Any] = NAN, **values: Any) -> Finding:
    row = Rows().add("forward", "act", "output", **(made | values))
    return Finding(cause, row, row, "act")


def _birth(op: str, tensor: str = "output", made: dict[str, Any] = NAN, **values: Any) -> Birth:
    rows = Rows()
    rows.birth(op, "act", tensor, made, **values)
    return read_births(rows.records)[0]


def _first(op: str, tensor: str = "output", made: dict[str, Any] = NAN) -> str:
    return hints_for(_finding(), None, _birth(op, tensor, made))[0]


def _known_to_torch() -> set[str]:
    nodes = {name for name in dir(torch._C._functions) if not name.startswith("__")}
    operators = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    return {op_name(name) for name in nodes | operators}


@pytest.mark.parametrize("hint", OP_HINTS, ids=lambda hint: hint.ops.split()[0])
def test_every_operation_of_the_table_is_a_node_or_an_operator_of_torch(hint: Any) -> None:
    assert {op_name(name) for name in hint.ops.split()} <= _known_to_torch()
    assert hint.forward or hint.backward


def test_no_operation_stands_in_the_table_twice() -> None:
    names = [op_name(name) for hint in OP_HINTS for name in hint.ops.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: x / x, "div"),
        (lambda x: x.sqrt(), "sqrt"),
        (lambda x: x**0.5, "pow"),
        (lambda x: x.norm(), "linalg_vector_norm"),
        (lambda x: x.std(), "std"),
        (lambda x: torch.cdist(x, x), "cdist"),
        (lambda x: torch.linalg.svd(x)[0], "_linalg_svd"),
        (lambda x: torch.linalg.slogdet(x)[1], "_linalg_slogdet"),
        (lambda x: x.log_softmax(-1), "log_softmax"),
        (lambda x: torch.nn.functional.nll_loss(x, torch.tensor([0, 1])), "nll_loss"),
        (lambda x: torch.nn.functional.layer_norm(x, (2,)), "native_layer_norm"),
        (lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), "native_batch_norm"),
        (lambda x: torch.nn.functional.linear(x, x, x[0]), "addmm"),
        (lambda x: x.masked_fill(x > 0, -1e9), "masked_fill"),
        (lambda x: x.half(), "_to_copy"),
    ],
)
def test_the_nodes_that_people_meet_find_their_line_of_the_table(make: Any, name: str) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    (hint,) = [hint for hint in OP_HINTS if name in hint.ops.split()]
    assert _first(make(x).grad_fn.name(), made=INF) == hint.forward


def test_an_assignment_into_a_slice_has_a_line_of_the_table() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    x[0] = 2.0 * x[1]
    assert "written or cast into a narrower dtype" in _first(x.grad_fn.name())


@pytest.mark.parametrize("op", ["MaskedFillBackward0", "aten.copy_", "aten.mul", "aten.lift_fresh"])
def test_a_constant_that_was_filled_in_is_hinted_at_whatever_wrote_it(op: str) -> None:
    assert hints_for(_finding(), None, _birth(op, made=NEGINF, fill=True))[0].startswith("it wrote an infinity")


def test_one_operation_fails_forward_and_backward_for_different_reasons() -> None:
    assert "the argument was negative" in _first("SqrtBackward0")
    assert "infinite slope at 0" in _first("SqrtBackward0", "grad_input")
    assert "0/0 is nan" in _first("aten.div")
    assert "torch.where or nan_to_num after it mends only the forward" in _first("DivBackward1", "grad_input")


@pytest.mark.parametrize(
    ("op", "overflow", "of_nan"),
    [
        ("MulBackward0", "the product left the dtype's range", "0 times inf is nan"),
        ("AddBackward0", "the sum left the dtype's range", "inf - inf is nan"),
        ("BmmBackward0", "a sum of products left the dtype's range", "overflowed with both signs"),
    ],
)
def test_arithmetic_makes_inf_by_overflow_and_nan_of_infinities(op: str, overflow: str, of_nan: str) -> None:
    assert overflow in _first(op, made=INF)
    assert of_nan in _first(op, made=NAN)


def test_the_hint_of_the_operation_replaces_that_of_the_module() -> None:
    birth = _birth("DivBackward0")
    assert hints_for(_finding(), "LayerNorm", birth)[0].startswith("the denominator was 0")
    assert hints_for(_finding(), "LayerNorm")[0].startswith("an infinite input becomes nan here")


def test_an_operation_that_the_table_lacks_leaves_the_hint_of_the_module() -> None:
    known = hints_for(_finding(), "LayerNorm")
    assert hints_for(_finding(), "LayerNorm", _birth("GridSampler2DBackward0")) == known
    assert hints_for(_finding(), "LayerNorm", _birth("Atan2Backward0")) == known  # nothing to say of its forward


def test_a_function_of_the_users_own_is_known_by_its_name() -> None:
    assert "autograd.Function of the code's own" in _first("SurvivalProductBackward", "grad_input")


def _half(birth: Birth | None, finding: Finding) -> tuple[str, ...]:
    return hints_for(finding, None, birth)[1:]


def test_an_overflow_of_float16_has_the_limit_beside_the_largest_operand() -> None:
    half = {"dtype": "float16"}
    operands = [("input", "self", {"min": -61000.0, "max": 3.0}), ("input", "mat2", {"min": -0.5, "max": 0.5})]
    birth = _birth("MmBackward0", made=INF | half, operands=operands)
    assert _half(birth, _finding(made=INF, **half)) == (
        "float16 ends at 65504, and the operands reached 61000: run this part in float32 or bfloat16, or scale its "
        "input down",
    )
    assert _half(None, _finding(made=INF, **half)) == (
        "float16 ends at 65504: run this part in float32 or bfloat16, or scale its input down",
    )


@pytest.mark.parametrize(
    ("made", "fill", "dtype"), [(NAN, False, "float16"), (NEGINF, True, "float16"), (INF, False, "float32")]
)
def test_no_overflow_is_seen_in_nan_in_a_fill_and_in_wider_dtypes(made: dict[str, Any], fill: bool, dtype: str) -> None:
    birth = _birth("MulBackward0", made=made | {"dtype": dtype}, fill=fill)
    assert _half(birth, _finding(made=made, dtype=dtype)) == ()


def _of_cause(cause: Cause, module_type: str | None = None, **values: Any) -> str:
    (hint,) = hints_for(_finding(cause, **values), module_type)
    return hint


def test_where_no_operation_is_to_blame_the_cause_decides() -> None:
    assert "1e-8 is 0 in float16" in _of_cause(Cause.UPDATE, made=INF, dtype="float16")
    assert "a division by a norm of 0" in _of_cause(Cause.UPDATE, made=INF, dtype="bfloat16")
    assert "check the scheduler" in _of_cause(Cause.LEARNING_RATE)
    assert "initialise the whole table" in _of_cause(Cause.INITIAL, "Embedding")
    assert "check the checkpoint" in _of_cause(Cause.INITIAL, "Linear")


def test_hints_are_one_or_two_sentences_without_a_stop_at_the_end() -> None:
    texts = [text for hint in OP_HINTS for text in hint[1:] if text]
    assert not [text for text in texts if text.endswith(".") or len(text) > 240 or text[0].isspace()]


def test_every_cause_has_a_hint_for_every_kind_of_value() -> None:
    for cause in Cause:
        for made in (NAN, INF, NEGINF):
            row: Record = Rows().add("forward", "act", "output", **made)
            assert all(hints_for(Finding(cause, row, row, "act"), None))
