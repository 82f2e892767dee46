"""Which operands' ranges are shown, and which of them are said to explain the failure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradtrace.analysis.births import read_births
from gradtrace.analysis.ranges import LARGEST, OperandRange, operand_ranges
from tests.analysis.rows import INF, NAN, NEGINF, Rows


def _between(low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"min": low, "max": high, **more}


def _ranges(op: str, tensor: str, made: dict[str, Any], *operands: tuple[str, str, dict[str, Any]]) -> Any:
    rows = Rows()
    rows.birth(op, "act", tensor, made, operands=operands)
    (birth,) = read_births(rows.records)
    return operand_ranges(birth)


def _remark(op: str, name: str, values: dict[str, Any], tensor: str = "output") -> str | None:
    (found,) = _ranges(op, tensor, NAN, ("input", name, values))
    remark: str | None = found.remark
    return remark


@pytest.mark.parametrize(
    ("op", "name", "values", "remark"),
    [
        ("DivBackward0", "other", _between(0.0, 12.3), "holds 0"),
        ("aten.div", "1", _between(-3.0, 0.0), "holds 0"),
        ("DivBackward0", "other", _between(-1.0, 2.0), "may hold 0"),
        ("DivBackward0", "other", _between(1e-6, 2.0), None),
        ("DivBackward0", "self", _between(0.0, 2.0), None),
        ("ReciprocalBackward0", "self", _between(0.0, 2.0), "holds 0"),
        ("LogBackward0", "self", _between(-0.5, 2.0), "holds negative numbers"),
        ("Log2Backward0", "self", _between(0.0, 2.0), "holds 0"),
        ("LogBackward0", "self", _between(0.1, 2.0), None),
        ("XlogyBackward0", "other", _between(0.0, 1.0), "holds 0"),
        ("Log1PBackward0", "self", _between(-1.0, 0.0), "holds -1"),
        ("Log1PBackward0", "self", _between(-1.5, 0.0), "holds numbers below -1"),
        ("SqrtBackward0", "self", _between(-1e-9, 2.0), "holds negative numbers"),
        ("SqrtBackward0", "self", _between(0.0, 2.0), None),  # the root of 0 is 0
        ("RsqrtBackward0", "self", _between(0.0, 2.0), "holds 0"),
        ("PowBackward0", "self", _between(-2.0, 2.0), "holds negative numbers"),
        ("AcosBackward0", "self", _between(-0.5, 1.0000001), "reaches beyond -1 to 1"),
        ("AtanhBackward0", "self", _between(-1.0, 0.5), "reaches 1 in magnitude, where the slope is not finite"),
        ("AcosBackward0", "self", _between(-0.5, 0.5), None),
        ("AcoshBackward0", "self", _between(0.5, 2.0), "holds numbers below 1"),
        ("VarBackward0", "self", _between(1.0, 1.0, numel=1), "has one element"),
        ("VarBackward0", "self", {"min": None, "max": None, "numel": 0}, "is empty"),
        ("MeanBackward0", "self", _between(1.0, 1.0, numel=1), None),
        ("MeanBackward0", "self", {"min": None, "max": None, "numel": 0}, "is empty"),
        ("MeanBackward0", "self", _between(0.0, 1.0, numel=5), None),
    ],
)
def test_a_forward_operand_outside_of_the_domain_is_said_to_be(
    op: str, name: str, values: dict[str, Any], remark: str | None
) -> None:
    assert _remark(op, name, values) == remark


@pytest.mark.parametrize(
    ("dtype", "value", "remark"),
    [
        ("float64", 710.0, "exp leaves float64 above 709.8"),
        ("float64", 709.0, None),
        ("float32", 89.0, "exp leaves float32 above 88.72"),
        ("float32", 88.0, None),
        ("bfloat16", 89.0, "exp leaves bfloat16 above 88.72"),
        ("float16", 12.0, "exp leaves float16 above 11.09"),
    ],
)
def test_exp_has_a_largest_argument_for_each_dtype(dtype: str, value: float, remark: str | None) -> None:
    assert _remark("ExpBackward0", "self", _between(0.0, value, dtype=dtype)) == remark


@pytest.mark.parametrize(
    ("op", "name", "values", "remark"),
    [
        ("DivBackward0", "saved.other", _between(0.0, 12.3), "holds 0"),
        ("SqrtBackward0", "saved.result", _between(0.0, 2.0), "holds 0, where the slope is not finite"),
        ("SqrtBackward0", "saved.result", _between(0.5, 2.0), None),
        ("LinalgVectorNormBackward0", "saved.result", _between(0.0, 0.0), None),  # its formula repairs that
        ("LogBackward0", "saved.self", _between(0.0, 1.0), "holds 0, where the slope is not finite"),
        ("PowBackward0", "saved.self", _between(-1.0, 1.0), "may hold 0"),
        ("XlogyBackward0", "saved.other", _between(0.0, 1.0), "holds 0"),
        ("AcosBackward0", "saved.self", _between(-1.0, 0.2), "reaches 1 in magnitude, where the slope is not finite"),
        ("NllLossBackward0", "saved.total_weight", _between(0.0, 0.0), "holds 0"),
    ],
)
def test_a_saved_operand_at_which_the_slope_is_infinite_is_said_to_be(
    op: str, name: str, values: dict[str, Any], remark: str | None
) -> None:
    assert _remark(op, name, values, "grad_input") == remark


def test_an_operand_that_was_infinite_already_is_said_to_be() -> None:
    assert _remark("MulBackward0", "other", _between(0.0, 0.0, neginf_count=1024)) == "holds 1,024 -inf"
    values = _between(0.0, 0.0, nan_count=2, posinf_count=1)
    assert _remark("DivBackward0", "saved.other", values, "grad_input") == "holds 2 nan and 1 inf"


def test_what_explains_the_failure_comes_first_and_three_are_shown() -> None:
    saved = ("input", "saved.other", _between(0.0, 12.3))
    others = [("grad_output", str(number), _between(0.0, 1.0)) for number in range(4)]
    found = _ranges("DivBackward0", "grad_input", NAN, *others, saved)
    assert found == [
        OperandRange("saved other", 0.0, 12.3, "holds 0"),
        OperandRange("grad_output 0", 0.0, 1.0, None),
        OperandRange("grad_output 1", 0.0, 1.0, None),
    ]


def test_beside_the_largest_operand_of_an_overflow_stands_where_the_dtype_ends() -> None:
    weight, batch = ("input", "weight", _between(-0.5, 0.5)), ("input", "self", _between(-61000.0, 3.0))
    found = _ranges("MmBackward0", "output", INF | {"dtype": "float16"}, weight, batch)
    assert found == [
        OperandRange("self", -61000.0, 3.0, "float16 ends at 65504"),
        OperandRange("weight", -0.5, 0.5, None),
    ]


@pytest.mark.parametrize(
    ("made", "fill", "dtype"),
    [(NAN, False, "float16"), (NEGINF, True, "float16"), (INF, False, "complex64")],
)
def test_no_limit_is_named_for_nan_for_a_fill_and_for_a_dtype_without_one(
    made: dict[str, Any], fill: bool, dtype: str
) -> None:
    rows = Rows()
    operands = [("input", "self", _between(0.0, 6e4))]
    rows.birth("MulBackward0", "act", made=made | {"dtype": dtype}, operands=operands, fill=fill)
    (birth,) = read_births(rows.records)
    assert [operand.remark for operand in operand_ranges(birth)] == [None]


def test_the_largest_numbers_are_those_of_the_formats() -> None:
    assert {
        "float16": 65504.0,
        "bfloat16": float.fromhex("0x1.fep127"),
        "float32": float.fromhex("0x1.fffffep127"),
        "float64": math.nextafter(math.inf, 0.0),
    } == LARGEST
