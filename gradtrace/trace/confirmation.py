"""What a replay found, as it travels in the column ``detail``: plain data and its JSON, nothing else.

A replay leaves rows of phase ``replay``, one for each *birth*: an operation with finite operands and a
non-finite result (``OpDetail``), with the operands' rows just before it; and one event ``replay`` that says how
the replay went (``Confirmation``). The capture writes them, the analysis reads them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from gradtrace.trace.checking import json_object, misfit

Status = Literal["reproduced", "not_reproduced", "not_replayed"]


class SourceLine(NamedTuple):
    """One frame of a traceback, outside of torch and gradtrace."""

    file: str
    line: int
    function: str
    code: str = ""


class Boundary(NamedTuple):
    """A module call's output that a value flowed to: module, number of the call, path."""

    module: str
    call: int
    path: str


_Tuple = TypeVar("_Tuple", SourceLine, Boundary)


@dataclass(frozen=True)
class OpDetail:
    """Of one birth: where it was, and what became of its value.

    ``traceback`` has the innermost frame last. ``flows_to`` are the non-finite outputs of module calls that the
    value of a forward operation reached, in order. ``fill`` is true where the operation only wrote a non-finite
    constant that the code gave it (a mask filled with -inf).
    """

    traceback: tuple[SourceLine, ...] = ()
    flows_to: tuple[Boundary, ...] = ()
    fill: bool = False

    def to_json(self) -> str:
        """Return the document that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> OpDetail:
        """Read what ``to_json`` wrote; anything else gives an empty detail."""
        values = _object(text)
        return cls(
            _tuples(SourceLine, values.get("traceback")),
            _tuples(Boundary, values.get("flows_to")),
            values.get("fill") is True,
        )


@dataclass(frozen=True)
class Confirmation:
    """How a replay went.

    ``reason`` says why it was not reproduced or not replayed. ``anomaly_op`` and ``anomaly_output`` are the node
    and the number of its output that anomaly detection named, None where it had nothing to say. ``term`` is the
    addend of the loss that was non-finite, as its source line or its operation. ``place`` is where the loss code first
    met a value that no operation of it had made, the innermost frame last.
    """

    status: Status
    reason: str | None = None
    anomaly_op: str | None = None
    anomaly_output: int | None = None
    anomaly_message: str | None = None
    term: str | None = None
    place: tuple[SourceLine, ...] = ()

    def to_json(self) -> str:
        """Return the document that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> Confirmation:
        """Read what ``to_json`` wrote; anything else gives a replay that did not happen."""
        values = _object(text)
        known = {key: values[key] for key in cls.__dataclass_fields__ if key in values and key != "place"}
        if "status" not in known or misfit(cls, known) is not None:
            known = {"status": "not_replayed"}
        return cls(**known, place=_tuples(SourceLine, values.get("place")))


def _tuples(kind: type[_Tuple], rows: Any) -> tuple[_Tuple, ...]:
    """Return named tuples of what JSON has made lists of, none where one of these does not fit."""
    if not isinstance(rows, list):
        return ()
    names = kind._fields
    made = [dict(zip(names, row, strict=False)) for row in rows if isinstance(row, list) and len(row) <= len(names)]
    required = set(names) - kind._field_defaults.keys()
    if len(made) < len(rows) or any(misfit(kind, one) is not None or not required <= one.keys() for one in made):
        return ()
    return tuple(kind(**one) for one in made)


def _object(text: str | None) -> dict[str, Any]:
    try:
        return json_object(text or "")
    except ValueError:
        return {}
