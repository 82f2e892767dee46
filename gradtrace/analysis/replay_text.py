"""What a verdict says of the replay: which operation, on which line, from what, and how sure that is. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradtrace.analysis.ranges import OperandRange, operand_ranges
from gradtrace.analysis.scene import kind_of

if TYPE_CHECKING:
    from gradtrace.analysis.births import Birth, Explanation
    from gradtrace.trace.confirmation import SourceLine
    from gradtrace.trace.schema import Record

_WENT = {"reproduced": "reproduced", "not_reproduced": "not reproduced", "not_replayed": "not replayed"}


def operation(birth: Birth) -> Iterator[tuple[str, str]]:
    """Yield label and text of the lines on the operation that made the value, and on what it made it from."""
    value = short_kind(birth.row) if birth.kind else "value not measured"
    constant = ", a constant that the code gave it" if birth.detail.fill else ""
    where = _shown(birth.location) if birth.location else "on a line that is not known"
    yield "made by", f"{birth.op} ({value}{constant}), {where}"
    if birth.own_location and birth.own_location != birth.location:
        yield "called at", _shown(birth.own_location)
    ranges = "; ".join(map(_range, operand_ranges(birth)))
    if ranges and not birth.detail.fill:
        yield "operands", ranges


def replay(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """Yield label and text of the lines on the term of the loss and on how the replay went."""
    went = explanation.confirmation
    if explanation.birth is None and explanation.met_at is not None:
        yield "met at", _shown(explanation.met_at)
    if went.term:
        yield "term", went.term.removeprefix("term ")
    if not explanation.recorded:
        yield "replay", f"none: {went.reason}"
        return
    how = f"{_WENT[went.status]}: {went.reason}" if went.reason else _WENT[went.status]
    yield "replay", "; ".join(filter(None, (how, _trust(explanation), _anomaly(explanation))))


def short_kind(row: Record) -> str:
    """Return nan, inf or -inf: the worst that the record holds."""
    return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[kind_of(row)]


def _trust(explanation: Explanation) -> str | None:
    """Say where the operation was seen, unless that is the replay that equals the step."""
    if explanation.birth is None:
        return "which operation made the value is not known"
    return {
        "reproduced": None,
        "not_reproduced": "the operation was met in the replay, and in the step it may have been another",
        "not_replayed": "the operation was met in the step itself",
    }[explanation.confirmation.status]


def _anomaly(explanation: Explanation) -> str | None:
    """Say what anomaly detection stops at; of a step that was not replayed it says nothing."""
    birth, op = explanation.birth, explanation.confirmation.anomaly_op
    if op is None:
        if birth is None or explanation.confirmation.status == "not_replayed" or birth.row.module is None:
            return None  # of code outside any module, which no replay runs, nobody has asked it
        return "anomaly detection sees nothing: it looks for nan only, in backward only"
    if birth is None:
        return f"anomaly detection stops at {op} (nan)"
    if not birth.in_backward:
        same = "the backward of the same operation" if explanation.anomaly_agrees else op
        return f"anomaly detection, which looks in backward only, stops at {same} (nan)"
    if explanation.anomaly_agrees:
        return "anomaly detection agrees"
    later = "" if birth.kind == "NaN" else "later, "
    return f"anomaly detection stops {later}at {op} (nan)"


def _range(operand: OperandRange) -> str:
    name, low, high, remark = operand
    because = f" ({remark})" if remark else ""
    if low is None or high is None:
        return f"{name}: nothing finite{because}"
    values = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    return f"{name}: {values}{because}"


def _shown(line: SourceLine) -> str:
    inside = os.getcwd() + os.sep
    function = f" in {line.function}" if line.function else ""
    code = f": {line.code}" if line.code else ""
    return f"{line.file.removeprefix(inside)}:{line.line}{function}{code}"
