"""Where two runs part ways: plain data, the modules that differ as a table, and the JSON object of ``diff --json``.

Knows no SQL. The words are in ``text.py``, asked for when it is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradtrace.analysis.compare.parts import Change, Kinds, Overlap, Pair, ScalarChange, Side, Unmatched, number
from gradtrace.analysis.tabular import Tabular

DIFFERENCE_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModuleDifference:
    """What differs in one module: of ``compared`` records so many, the first of them and the one furthest apart."""

    module: str | None
    type: str | None
    compared: int
    differing: int
    first: Pair
    worst: Pair

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        numbers = {name: getattr(self, name) for name in ("module", "type", "compared", "differing")}
        return {**numbers, "first": self.first.to_dict(), "worst": self.worst.to_dict()}


_COLUMNS: dict[str, str] = {
    "module": "string",
    "type": "string",
    "compared": "int64",
    "differing": "int64",
    "first_step": "int64",
    "first_phase": "string",
    "first_tensor": "string",
    "first_path": "string",
    "difference": "double",
    "step": "int64",
    "phase": "string",
    "tensor": "string",
    "path": "string",
    "statistic": "string",
}


@dataclass(frozen=True, repr=False)
class Difference(Tabular):
    """Where two runs part ways. ``str()`` is the text of ``gradtrace diff``; as a table it is the modules that differ.

    ``changes`` is what differs in command, versions, configuration and modules; ``scalars`` in learning rates and loss
    scales. ``first`` is the first boundary, in execution order, whose statistics differ beyond tolerance. ``modules``
    are those furthest apart, ``modules_differing`` counts all. ``tolerances`` are relative, by dtype.
    """

    a: Side
    b: Side
    overlap: Overlap
    tolerances: dict[str, float]
    changes: tuple[Change, ...] = ()
    scalars: tuple[ScalarChange, ...] = ()
    dtypes: tuple[Kinds, ...] = ()
    devices: tuple[Kinds, ...] = ()
    compared: int = 0
    differing: int = 0
    only_a: tuple[Unmatched, ...] = ()
    only_b: tuple[Unmatched, ...] = ()
    first: Pair | None = None
    first_type: str | None = None
    modules: tuple[ModuleDifference, ...] = ()
    modules_compared: int = 0
    modules_differing: int = 0

    @property
    def found(self) -> bool:
        """Whether the runs differ in what was recorded: a value, or a boundary that one of them lacks.

        What differs in command, versions, configuration, length, dtypes or devices is no difference by itself.
        """
        return bool(self.first or self.scalars or self.only_a or self.only_b)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: the module, its first record that differs, and the one that is furthest apart."""
        return tuple(_COLUMNS)

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """A row for each of ``modules``."""
        return [
            (
                *(line.module, line.type, line.compared, line.differing),
                *(line.first.a.step, line.first.a.phase, line.first.a.tensor, line.first.a.path),
                line.worst.difference,
                *(line.worst.a.step, line.worst.a.phase, line.worst.a.tensor, line.worst.a.path, line.worst.statistic),
            )
            for line in self.modules
        ]

    @property
    def types(self) -> Mapping[str, str]:
        """Arrow's names of the columns' types."""
        return _COLUMNS

    def __str__(self) -> str:
        from gradtrace.analysis.compare.text import text

        return text(self)

    def _repr_html_(self) -> str:
        from gradtrace.analysis.compare.text import html

        return html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``diff --json``; not measured is None, not finite a string."""
        return {
            "schema_version": DIFFERENCE_SCHEMA_VERSION,
            "found": self.found,
            "a": dataclasses.asdict(self.a),
            "b": dataclasses.asdict(self.b),
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "scalars": [
                {**dataclasses.asdict(scalar), "a": number(scalar.a), "b": number(scalar.b)} for scalar in self.scalars
            ],
            "dtypes": [dataclasses.asdict(kinds) for kinds in self.dtypes],
            "devices": [dataclasses.asdict(kinds) for kinds in self.devices],
            "overlap": dataclasses.asdict(self.overlap),
            "tolerances": self.tolerances,
            "compared": self.compared,
            "differing": self.differing,
            "only_a": [dataclasses.asdict(one) for one in self.only_a],
            "only_b": [dataclasses.asdict(one) for one in self.only_b],
            "first": {**self.first.to_dict(), "module_type": self.first_type} if self.first else None,
            "modules": [line.to_dict() for line in self.modules],
            "modules_compared": self.modules_compared,
            "modules_differing": self.modules_differing,
        }
