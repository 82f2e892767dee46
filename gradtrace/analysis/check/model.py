"""What ``check`` answers: the findings, each with its rule, and what was looked at. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from gradtrace.analysis.check.rule_files import Rule
from gradtrace.analysis.tabular import Tabular, counted
from gradtrace.printable import html_words

_TYPES = {
    "rule": "string",
    "severity": "string",
    "rank": "int64",
    "module": "string",
    "tensor": "string",
    "path": "string",
    "since": "int64",
    "step": "int64",
    "value": "double",
    "threshold": "double",
    "note": "string",
}
"""The columns, which are the fields of ``Symptom``, with their Arrow types."""


@dataclass(frozen=True)
class Symptom:
    """What one rule found at one place.

    ``since`` is the step in which it began, ``step`` the one in which ``value`` was seen, which lies beyond the
    ``threshold``; both are in the unit that the rule gives. ``module`` is None for what belongs to no module: the loss,
    all gradients together. ``note`` says the rest in words.
    """

    rule: str
    severity: str
    rank: int
    module: str | None
    tensor: str
    path: str | None
    since: int
    step: int
    value: float
    threshold: float
    note: str


@dataclass(frozen=True)
class Ask:
    """How the asking of one rule went: seconds, number of findings.

    ``lacks`` says what the run lacks, so that the rule could not be asked; None where it was.
    """

    rule: Rule
    seconds: float = 0.0
    found: int = 0
    lacks: str | None = None


@dataclass(frozen=True, repr=False)
class Checkup(Tabular):
    """The findings, the earliest first, and of what they are: rules that were asked, steps and modules looked at.

    ``modules`` counts those of the model that was recorded, ``ranks`` the processes looked at.
    """

    symptoms: list[Symptom]
    asks: list[Ask]
    steps: int
    full_steps: int
    modules: int
    ranks: int

    @property
    def found(self) -> bool:
        """Whether any rule found anything."""
        return bool(self.symptoms)

    @property
    def lacking(self) -> list[Ask]:
        """The rules that could not be asked, each with the reason."""
        return [ask for ask in self.asks if ask.lacks is not None]

    @property
    def conclusion(self) -> str:
        """Say in a line how many findings there are, and of what."""
        rules = counted(len(self.asks) - len(self.lacking), "rule")
        full = f" ({self.full_steps:,} in full)" if self.full_steps < self.steps else ""
        looked = [f"{rules} over {counted(self.steps, 'step')}{full}", counted(self.modules, "module")]
        looked += [counted(self.ranks, "rank")] if self.ranks > 1 else []
        found = counted(len(self.symptoms), "finding") if self.found else "No finding"
        return f"{found}: {', '.join(looked)}"

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns: the fields of ``Symptom``."""
        return list(_TYPES)

    @property
    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each finding."""
        return [astuple(symptom) for symptom in self.symptoms]

    @property
    def types(self) -> Mapping[str, str]:
        """The columns' types, which an empty table has too."""
        return _TYPES

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.conclusion}" if self.found else self.conclusion

    def _repr_html_(self) -> str:
        return (super()._repr_html_() if self.found else "") + f"<p>{html_words(self.conclusion)}</p>"
