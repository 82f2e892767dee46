"""What the ranges of its operands tell of an operation that failed: a zero below, a negative log, exp of 710.

Pure: a birth in, words out. A remark is made only where the range explains the failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gradtrace.analysis.births import Birth, op_name
from gradtrace.trace.schema import Record

LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": (2 - 2**-52) * 2.0**1023,
}
"""The largest finite number of each dtype."""

_SHOWN = 3


class OperandRange(NamedTuple):
    """One operand: its name, its smallest and largest finite element, and what these explain, if anything."""

    name: str
    low: float | None
    high: float | None
    remark: str | None


Remark = Callable[[Record], str | None]


class _Rule(NamedTuple):
    """``remark`` looks at those operands of the operations ``ops`` that are named in ``operands``."""

    ops: str
    operands: str
    remark: Remark


def operand_ranges(birth: Birth) -> list[OperandRange]:
    """Return the ranges of at most three operands, those that explain the failure first."""
    found = [OperandRange(_name(row), row.min, row.max, _remark(birth, row)) for row in birth.operands]
    if birth.row.nonfinite_count > (birth.row.nan_count or 0) and not any(operand.remark for operand in found):
        found = _beside_the_limit(birth, found)
    return sorted(found, key=lambda operand: operand.remark is None)[:_SHOWN]


def largest_magnitude(row: Record) -> float:
    """Return the largest finite magnitude of a record, 0 where there is none."""
    return max((abs(value) for value in (row.min, row.max) if value is not None), default=0.0)


def _name(row: Record) -> str:
    """Name an operand: what the backward had kept of the forward's ``other`` is "saved other"."""
    return row.path.replace("saved.", "saved ", 1) if row.tensor == "input" else f"{row.tensor} {row.path}"


def _remark(birth: Birth, row: Record) -> str | None:
    if row.nonfinite_count:
        kinds = ((row.nan_count, "nan"), (row.posinf_count, "inf"), (row.neginf_count, "-inf"))
        return f"holds {' and '.join(f'{count:,} {kind}' for count, kind in kinds if count)}"
    if row.tensor != "input":
        return None
    for rule in _BACKWARD if birth.in_backward else _FORWARD:
        if op_name(birth.op) in map(op_name, rule.ops.split()) and row.path in rule.operands.split():
            return rule.remark(row)
    return None


def _beside_the_limit(birth: Birth, found: Iterable[OperandRange]) -> list[OperandRange]:
    """Put the dtype's limit beside the largest operand of an operation that left its range."""
    limit = LARGEST.get(birth.row.dtype or "")
    sizes = [largest_magnitude(row) for row in birth.operands]
    if limit is None or birth.detail.fill or not any(sizes):
        return list(found)
    largest = sizes.index(max(sizes))
    remark = f"{birth.row.dtype} ends at {limit:.5g}"
    return [operand._replace(remark=remark) if number == largest else operand for number, operand in enumerate(found)]


def _holds(row: Record, value: float, then: str) -> str | None:
    """Say that the record holds ``value``, or may: of its elements only the smallest and largest are known."""
    if row.min is None or row.max is None or not row.min <= value <= row.max:
        return None
    words = "holds" if value in (row.min, row.max) else "may hold"
    return f"{words} {value:g}{then}"


def _zero(row: Record) -> str | None:
    return _holds(row, 0.0, "")


def _zero_slope(row: Record) -> str | None:
    return _holds(row, 0.0, ", where the slope is not finite")


def _below(limit: float, *, included: bool = True) -> Remark:
    """Make a remark for elements below a limit, or also for those at it, if it is ``included``."""

    def remark(row: Record) -> str | None:
        if row.min is not None and row.min < limit:
            return "holds negative numbers" if limit == 0 else f"holds numbers below {limit:g}"
        return _holds(row, limit, "") if included and row.min == limit else None

    return remark


def _outside_one(row: Record) -> str | None:
    reached = largest_magnitude(row)
    return "reaches beyond -1 to 1" if reached > 1 else _edge_of_one(row)


def _edge_of_one(row: Record) -> str | None:
    return "reaches 1 in magnitude, where the slope is not finite" if largest_magnitude(row) == 1 else None


def _too_large_for_exp(row: Record) -> str | None:
    limit = LARGEST.get(row.dtype or "")
    if limit is None or row.max is None or row.max <= math.log(limit):
        return None
    return f"exp leaves {row.dtype} above {math.log(limit):.4g}"


def _empty(row: Record) -> str | None:
    return "is empty" if row.numel == 0 else None


def _too_few(row: Record) -> str | None:
    return "has one element" if row.numel == 1 else _empty(row)


_FORWARD = (
    _Rule("div true_divide remainder fmod", "other 1", _zero),
    _Rule("reciprocal", "self 0", _zero),
    _Rule("log log2 log10", "self 0", _below(0.0)),
    _Rule("xlogy", "other 1", _below(0.0)),
    _Rule("log1p", "self 0", _below(-1.0)),
    _Rule("sqrt", "self 0", _below(0.0, included=False)),
    _Rule("rsqrt pow float_power", "self 0", _below(0.0)),
    _Rule("acosh", "self 0", _below(1.0, included=False)),
    _Rule("acos asin atanh erfinv", "self 0", _outside_one),
    _Rule("exp expm1", "self 0", _too_large_for_exp),
    _Rule("std var std_mean var_mean", "self 0", _too_few),
    _Rule("mean", "self 0", _empty),
)
# Not norm, std, cdist and atan2: their formulas repair what 0 would do.
_BACKWARD = (
    _Rule("div true_divide xlogy", "saved.other", _zero),
    _Rule("pow float_power", "saved.self", _zero),
    _Rule("log log2 log10", "saved.self", _zero_slope),
    _Rule("sqrt", "saved.result", _zero_slope),
    _Rule("acos asin atanh erfinv", "saved.self", _edge_of_one),
    _Rule("nll_loss nll_loss2d", "saved.total_weight", _zero),
)
