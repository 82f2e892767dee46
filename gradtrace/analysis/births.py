"""What a replay left in the file, read back: births with their operands, and the answer that is made of one.

Plain data and its JSON. Which birth explains a verdict is decided in ``confirmation``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradtrace.analysis.scene import kind_of
from gradtrace.trace.confirmation import Confirmation, OpDetail, SourceLine
from gradtrace.trace.schema import Record

_FOREIGN = re.compile(r"[\\/](site-packages|dist-packages|lib[\\/]python\d[\d.]*)[\\/]")


@dataclass(frozen=True)
class Birth:
    """An operation that made a non-finite value out of finite ones.

    ``row`` is its result, ``operands`` what it read (``path`` names them; ``saved.self`` is what the backward
    had kept of the forward's ``self``).
    """

    row: Record
    detail: OpDetail
    operands: tuple[Record, ...] = ()

    @property
    def op(self) -> str:
        """The autograd node's name, else the ATen name."""
        return self.row.op or ""

    @property
    def kind(self) -> str | None:
        """What the result holds: "NaN", "Infinity" or "-Infinity"; None where it could not be measured."""
        return kind_of(self.row) if self.row.nonfinite_count else None

    @property
    def in_backward(self) -> bool:
        """Whether it happened in the backward pass."""
        return self.row.tensor == "grad_input"

    @property
    def has_node(self) -> bool:
        """Whether a gradient flows through it, and ``op`` is the name of its autograd node."""
        return "Backward" in self.op

    @property
    def location(self) -> SourceLine | None:
        """The innermost frame outside of torch, None where no line is known."""
        if self.detail.traceback:
            return self.detail.traceback[-1]
        if self.row.file is None or self.row.line is None:
            return None
        return SourceLine(self.row.file, self.row.line, "")

    @property
    def own_location(self) -> SourceLine | None:
        """The innermost frame outside of installed packages."""
        return next((line for line in reversed(self.detail.traceback) if not _FOREIGN.search(line.file)), None)


@dataclass(frozen=True)
class Explanation:
    """What the replay says of a verdict: how it went, and the operation, if one was found.

    ``recorded`` is false where the file holds nothing of a replay, and ``confirmation.reason`` says why.
    """

    confirmation: Confirmation
    birth: Birth | None = None
    recorded: bool = True

    @property
    def anomaly_agrees(self) -> bool | None:
        """Whether anomaly detection named the same operation; None where one of the two says nothing."""
        if self.birth is None or self.confirmation.anomaly_op is None:
            return None
        return self.confirmation.anomaly_op == self.birth.op

    @property
    def met_at(self) -> SourceLine | None:
        """Where a value first was met that no operation had made."""
        return self.confirmation.place[-1] if self.confirmation.place else None

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of ``first-nan --json`` that a replay fills."""
        birth, went = self.birth, self.confirmation
        traceback = birth.detail.traceback if birth else went.place
        location = birth.location if birth else self.met_at
        return {
            "op": birth.op if birth else None,
            "op_kind": birth.kind if birth else None,
            "location": _frame(location) if location else None,
            "traceback": [_frame(line) for line in traceback],
            "term": went.term,
            "confirmation": {
                "status": went.status,
                "reason": went.reason,
                "anomaly_op": went.anomaly_op,
                "anomaly_agrees": self.anomaly_agrees,
                "anomaly_message": went.anomaly_message,
            },
        }


def nothing_to_explain() -> dict[str, Any]:
    """Return the keys of ``Explanation.to_dict`` for a run with nothing wrong."""
    confirmation = dict.fromkeys(("status", "reason", "anomaly_op", "anomaly_agrees", "anomaly_message"))
    nothing = dict.fromkeys(("op", "op_kind", "location"))
    return {**nothing, "traceback": [], "term": None, "confirmation": confirmation}


def read_births(rows: Iterable[Record]) -> list[Birth]:
    """Put the rows of phase ``replay``, in order of ``seq``, together to births."""
    births: list[Birth] = []
    operands: list[Record] = []
    for row in rows:
        if row.detail is None:
            operands.append(row)
        else:
            births.append(Birth(row, OpDetail.from_json(row.detail), tuple(operands)))
            operands = []
    return births


def op_name(op: str) -> str:
    """Return what "DivBackward0" and "aten.div" have in common: the name alone, in lower case, without "_"."""
    name = re.sub(r"^(.*::|aten\.)", "", op)
    return re.sub(r"Backward\d+$", "", name).replace("_", "").lower()


def _frame(line: SourceLine) -> dict[str, Any]:
    return {
        "file": line.file,
        "line": line.line,
        "function": line.function or None,
        "code": line.code or None,
    }
