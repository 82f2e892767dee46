"""What the difference of two runs is made of: plain data. Knows no SQL and no words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from gradtrace.analysis.verdict_model import shape_of
from gradtrace.trace.schema import Record

ChangeKind = Literal[
    "command",
    "version",
    "config",
    "module_type",
    "module_parameters",
    "module_renamed",
    "module_removed",
    "module_added",
]

_KEY = ("step", "micro_step", "phase", "module", "call", "tensor", "path")
_SIDE = (
    "rank",
    "seq",
    "dtype",
    "device",
    "shape",
    "numel",
    "nan_count",
    "posinf_count",
    "neginf_count",
    "min",
    "max",
    "norm",
)


@dataclass(frozen=True)
class Side:
    """One of the two runs. ``steps`` and ``records`` are what it recorded, in all of its ranks."""

    path: str
    command: tuple[str, ...]
    steps: int
    records: int
    ranks: int
    end: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """One thing that differs in what is known of the runs besides their records; None is what a run does not have.

    ``name`` is the option's, package's or module's; a renamed module has its two names in ``a`` and ``b``.
    """

    kind: ChangeKind
    name: str
    a: Any = None
    b: Any = None


@dataclass(frozen=True)
class ScalarChange:
    """A learning rate or loss scale that differs: where it first does, both values, and in how many records."""

    tensor: str
    path: str
    rank: int
    step: int
    a: float | None
    b: float | None
    records: int


@dataclass(frozen=True)
class Kinds:
    """So many records have the dtype, or are on the device, ``a`` in the one run and ``b`` in the other."""

    a: str
    b: str
    records: int


@dataclass(frozen=True)
class Unmatched:
    """Records of a module that only one of the runs has, in steps that both have in full, and the first such step."""

    module: str | None
    records: int
    first_step: int


@dataclass(frozen=True)
class Overlap:
    """The steps that both runs have: how many, from where to where, and how many are in full in both.

    ``only_a`` and ``only_b`` count the steps that one of them has alone; the ``ranks`` are those that were compared.
    """

    steps: int
    first: int
    last: int
    full: int
    only_a: int
    only_b: int
    ranks: tuple[int, ...]
    ranks_only_a: tuple[int, ...] = ()
    ranks_only_b: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """The same boundary in both runs. ``statistic`` is the column that differs most, or that decides.

    ``difference`` is relative, as ``tolerance.py`` has it: infinite where the counts of NaN and Inf differ.
    """

    a: Record
    b: Record
    statistic: str
    difference: float
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object: what both have in common, then each side's own."""
        return {
            **{name: getattr(self.a, name) for name in _KEY},
            "statistic": self.statistic,
            "difference": number(self.difference),
            "tolerance": self.tolerance,
            "a": _side(self.a),
            "b": _side(self.b),
        }


def _side(row: Record) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _SIDE}
    return {**values, "shape": shape_of(row)}


def number(value: float | None) -> float | str | None:
    """Return a number that JSON knows, or the name of one that it does not."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
