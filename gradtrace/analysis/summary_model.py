"""What a summary is: its lines, their columns, and the table that they make. Knows no SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

from gradtrace.analysis.labels import module_label
from gradtrace.analysis.sparkline import sparkline
from gradtrace.analysis.tabular import Tabular

By = Literal["module", "type", "step"]
"""What makes a line."""

SERIES = ("grad_norms", "output_norms")
"""Columns that hold a number for each stretch of steps."""

_ARROW = {
    str: "string",
    int: "int64",
    bool: "bool",
    float | None: "double",
    list[float | None]: "list<double>",
}


@dataclass
class ModuleLine:
    """A module, with those that are folded into it, or all modules of a type.

    ``parameters`` is a number of elements, ``calls`` of calls. The two series hold the largest norm of each
    stretch of steps: None where nothing was recorded, NaN where something was not finite. ``grad_norm`` is
    the norm of the last step that has finite gradients. ``max_output``, ``max_grad`` and ``max_param`` are
    the largest finite magnitudes; ``nan`` and ``inf`` count records that hold such elements.
    """

    name: str
    type: str
    parameters: int = 0
    calls: int = 0
    records: int = 0
    grad_norms: list[float | None] = field(default_factory=list)
    grad_norm: float | None = None
    output_norms: list[float | None] = field(default_factory=list)
    max_output: float | None = None
    max_grad: float | None = None
    max_param: float | None = None
    nan: int = 0
    inf: int = 0


@dataclass
class Course:
    """The losses of a run, or the norms of all its gradients: the largest size in each stretch, and the last value.

    Stretches are those of ``ModuleLine``.
    """

    points: list[float | None]
    last: float | None = None


@dataclass
class StepLine:
    """A step of one rank; the extremes are those of ``ModuleLine``. ``level`` is "full" or "watched"."""

    rank: int
    step: int
    level: str
    records: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    max_output: float | None
    max_grad: float | None
    max_param: float | None
    nan: int
    inf: int
    skipped: bool


_MEASURED = tuple(one.name for one in fields(ModuleLine) if one.name not in ("name", "type"))
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "module": ("module", "type", *_MEASURED),
    "type": ("type", *_MEASURED),
    "step": tuple(one.name for one in fields(StepLine)),
}
"""The columns of a summary by module, by type, and by step."""


@dataclass(frozen=True, repr=False)
class Summary(Tabular):
    """A run in lines: a module, a type of modules, or a step each, in the order of the model or of time.

    The columns are the fields of ``ModuleLine`` (whose name is the module or the type) or ``StepLine``; '' is the root.
    """

    by: By
    lines: tuple[ModuleLine, ...] | tuple[StepLine, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return COLUMNS[self.by]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """A row for each line."""
        names = ["name" if name == "module" else name for name in self.columns]
        return [tuple(getattr(line, name) for name in names) for line in self.lines]

    @property
    def types(self) -> Mapping[str, str]:
        """Arrow's names of the columns' types."""
        hints = get_type_hints(StepLine if self.by == "step" else ModuleLine)
        return {name: _ARROW[hint] for name, hint in hints.items()} | {"module": "string"}

    def _head(self) -> tuple[list[Sequence[Any]], str]:
        rows, rest = super()._head()
        return [[cell(name, value) for name, value in zip(self.columns, row, strict=True)] for row in rows], rest


def cell(column: str, value: Any, draw: Callable[[Sequence[float | None]], str] = sparkline) -> Any:
    """Return a value as people are shown it: the root by its name, a series as ``draw`` has it."""
    if column in SERIES:
        return draw(value)
    return module_label(value) if column == "module" else value
