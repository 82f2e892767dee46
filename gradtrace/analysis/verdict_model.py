"""What a verdict is: plain data, its records as a table, and the JSON object that scripts rely on.

Knows no SQL, no rules and no words: those are in ``verdict_text`` and ``verdict_html``, asked for when it is shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gradtrace.analysis.births import Explanation, nothing_to_explain
from gradtrace.analysis.scene import kind_of
from gradtrace.analysis.tabular import Tabular
from gradtrace.trace.schema import COLUMNS, Record

VERDICT_SCHEMA_VERSION = 1

_RECORD_KEYS = (
    "step",
    "micro_step",
    "rank",
    "seq",
    "phase",
    "module",
    "call",
    "tensor",
    "path",
    "dtype",
    "shape",
    "numel",
    "nan_count",
    "posinf_count",
    "neginf_count",
    "min",
    "max",
    "norm",
)
_BOUNDARY_KEYS = (
    "step",
    "micro_step",
    "rank",
    "seq",
    "phase",
    "module",
    "module_type",
    "call",
    "tensor",
    "path",
    "kind",
    "nan_count",
    "posinf_count",
    "neginf_count",
    "numel",
    "dtype",
    "shape",
)


class Cause(Enum):
    """What made the first non-finite value, as far as the records tell; the value is the verdict's phase."""

    BATCH = ("input", "batch")
    INITIAL = ("parameter", "initial")
    MOVED_IN = ("parameter", "moved in")
    MODULE = ("forward", "module")
    BETWEEN = ("forward", "between")
    BUFFER = ("forward", "buffer")
    LOSS = ("loss", "loss")
    BACKWARD = ("backward", "module")
    BACKWARD_BETWEEN = ("backward", "between")
    GRADIENT = ("backward", "gradient")
    CHANGED_GRADIENT = ("optimizer", "gradient")
    UPDATE = ("optimizer", "update")
    LEARNING_RATE = ("optimizer", "learning rate")
    LOSS_SCALE = ("optimizer", "loss scale")

    @property
    def phase(self) -> str:
        """The verdict's ``phase``."""
        return self.value[0]


class Fate(str, Enum):
    """What became of a non-finite value at one boundary."""

    MADE = "made"
    PASSED_ON = "passed on"
    CONTAINED = "contained"
    TOLERATED = "tolerated"


@dataclass(frozen=True)
class Finding:
    """The answer that the rules give: ``row`` is the boundary that is named, ``seen`` the first bad record.

    They differ where the value was made by a module's own code between two of its children: then ``row`` is
    where it leaves that module. ``maker`` is the module whose code made it, None for code outside any module.
    """

    cause: Cause
    row: Record
    seen: Record
    maker: str | None = None
    fates: dict[int, Fate] = field(default_factory=dict)
    dismissed: tuple[Record, ...] = ()
    all_tolerated: bool = False
    rivals: tuple[Record, ...] = ()


@dataclass(frozen=True)
class IncidentSummary:
    """One incident of the run over all ranks, numbered from 1."""

    number: int
    first_step: int
    last_step: int
    ended: bool
    reached: tuple[str, ...]
    ranks: tuple[int, ...]
    chosen: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that ``incidents`` holds in JSON."""
        return {
            "incident": self.number,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "ended": self.ended,
            "reached": list(self.reached),
            "ranks": list(self.ranks),
            "chosen": self.chosen,
        }


@dataclass(frozen=True)
class Candidate:
    """Another reading that the records cannot exclude, and the command that would decide it."""

    phase: str
    step: int | None
    module: str | None
    tensor: str | None
    why: str
    next: str

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that ``candidates`` holds in JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Spread:
    """How many distinct parameters, gradients and modules were non-finite; of the first two, of how many."""

    params: int = 0
    grads: int = 0
    modules: int = 0
    all_params: int = 0
    all_grads: int = 0


@dataclass(frozen=True)
class RunFacts:
    """What is said of the run itself.

    ``missing`` says in words what the recording does not hold; ``damaged`` is true where some of it had been recorded.
    """

    path: str
    steps: int
    end: str
    missing: tuple[str, ...] = ()
    modules: int = 0
    records: int = 0
    last_step: int | None = None
    damaged: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that ``run`` holds in JSON."""
        return {"path": self.path, "steps": self.steps, "end": self.end, "missing": list(self.missing)}


@dataclass(frozen=True, repr=False)
class Verdict(Tabular):
    """The first non-finite boundary of an incident and what made it; ``finding`` is None with nothing wrong.

    ``since`` maps what was reached (loss, grad, buffer, param) to the step in which it first was;
    ``explanation`` is what the replay of the step says of the finding. ``of_skips`` is true where skipped steps were
    asked for; ``loss_scales`` are those of the steps of an incident of skips, with the step. ``str()`` is the text of
    ``gradtrace first-nan``; as a table it is the records that led to it.
    """

    run: RunFacts
    finding: Finding | None = None
    module_type: str | None = None
    source: tuple[str, int] | None = None
    incident: IncidentSummary | None = None
    reached: tuple[str, ...] = ()
    since: dict[str, int] = field(default_factory=dict)
    received_by: tuple[int, ...] = ()
    handled: bool = False
    context: tuple[Record, ...] = ()
    history: tuple[Record, ...] = ()
    affected: Spread = Spread()
    contained: tuple[Record, ...] = ()
    fates: dict[int, Fate] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    incidents: tuple[IncidentSummary, ...] = ()
    hints: tuple[str, ...] = ()
    explanation: Explanation | None = None
    of_skips: bool = False
    loss_scales: tuple[tuple[int, float | None], ...] = ()

    @property
    def found(self) -> bool:
        """Whether something that matters was non-finite."""
        return self.finding is not None

    @property
    def trail(self) -> tuple[Record, ...]:
        """The records that led to the boundary that is named, and that one, oldest first."""
        if self.finding is None:
            return ()
        rows = (*self.context, self.finding.row)
        if self.finding.cause is not Cause.INITIAL:
            return rows
        return tuple(sorted({row.seq: row for row in (*rows, self.finding.seen)}.values(), key=lambda row: row.seq))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: those of a record, and what became of the value there."""
        return (*_RECORD_KEYS, "fate")

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """A row for each record of ``trail``; ``fate`` is made, passed on, contained, tolerated, or None."""
        return [
            (*(getattr(row, key) for key in _RECORD_KEYS), fate.value if (fate := self.fates.get(row.seq)) else None)
            for row in self.trail
        ]

    @property
    def types(self) -> Mapping[str, str]:
        """Arrow's names of the columns' types: those of the recording."""
        return {column.name: column.type for column in COLUMNS} | {"fate": "string"}

    def __str__(self) -> str:
        from gradtrace.analysis.verdict_text import text

        return text(self)

    def _repr_html_(self) -> str:
        from gradtrace.analysis.verdict_html import html

        return html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``first-nan --json``; not measured is None, not finite a string."""
        finding = self.finding
        return {
            "schema_version": VERDICT_SCHEMA_VERSION,
            "found": self.found,
            **_boundary(finding, self.module_type),
            **(self.explanation.to_dict() if self.explanation else nothing_to_explain()),
            "reached": list(self.reached),
            "received_by": list(self.received_by),
            "handled": self.handled if finding else None,
            "context": [self._record(row) for row in self.context],
            "history": [self._record(row) for row in self.history],
            "affected": self._affected(),
            "contained": [self._record(row) for row in self.contained],
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "incidents": [incident.to_dict() for incident in self.incidents],
            "hints": list(self.hints),
            "run": self.run.to_dict(),
        }

    def _affected(self) -> dict[str, int | None]:
        if self.finding is None:
            return {"params": None, "grads": None, "modules": None}
        return {key: getattr(self.affected, key) for key in ("params", "grads", "modules")}

    def _record(self, row: Record) -> dict[str, Any]:
        fate = self.fates.get(row.seq)
        return {**record_to_dict(row), "fate": fate.value if fate else None}


def record_to_dict(row: Record) -> dict[str, Any]:
    """Return a record as JSON values, without the columns that only replays and events fill."""
    values = {key: _json_value(getattr(row, key)) for key in _RECORD_KEYS}
    return {**values, "shape": shape_of(row)}


def shape_of(row: Record) -> list[int] | None:
    """Return the record's shape as numbers, None where it has none."""
    try:
        shape = json.loads(row.shape or "")
    except (ValueError, RecursionError):
        return None
    return shape if isinstance(shape, list) else None


def _boundary(finding: Finding | None, module_type: str | None) -> dict[str, Any]:
    if finding is None:
        return dict.fromkeys(_BOUNDARY_KEYS)
    special = {
        "phase": finding.cause.phase,
        "module_type": module_type,
        "kind": kind_of(finding.row),
        "shape": shape_of(finding.row),
    }
    return {key: special[key] if key in special else getattr(finding.row, key) for key in _BOUNDARY_KEYS}


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
