"""A birth: an operation with finite operands and a non-finite result, and how it becomes rows. Looks for none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.statistics import Measure
from gradtrace.trace.confirmation import Boundary, OpDetail, SourceLine

MOST = 50
"""So many births of one replay are kept: after the first few everything is non-finite."""


@dataclass
class Operand:
    """What an operation read: ``tensor`` is input or grad_output, ``path`` its name or number."""

    tensor: str
    path: str
    measure: Measure


@dataclass
class Birth:
    """One operation that made a non-finite value out of finite ones.

    ``op`` is the autograd node's name, else the ATen name. ``owner`` and ``call`` are the innermost module call
    that it ran in. ``tensor`` is output (forward) or grad_input (backward), ``index`` the number of the result.
    For ``flows_to`` and ``fill`` see ``OpDetail``.
    """

    op: str
    owner: ModuleEntry | None
    call: int | None
    tensor: str
    index: int
    result: Measure
    operands: list[Operand] = field(default_factory=list)
    traceback: tuple[SourceLine, ...] = ()
    flows_to: list[tuple[ModuleEntry, int, str]] = field(default_factory=list)
    fill: bool = False

    @property
    def detail(self) -> str:
        """What the row's column ``detail`` holds."""
        places = tuple(Boundary(entry.name, call, path) for entry, call, path in self.flows_to)
        return OpDetail(self.traceback, places, self.fill).to_json()

    @property
    def where(self) -> tuple[str | None, int | None]:
        """File and line of the innermost frame."""
        return (self.traceback[-1].file, self.traceback[-1].line) if self.traceback else (None, None)

    def rows(self) -> Iterator[tuple[str, str, Measure, str | None]]:
        """Yield tensor, path, measure and detail of the rows: the operands first, then the result."""
        for operand in self.operands:
            yield operand.tensor, operand.path, operand.measure, None
        yield self.tensor, str(self.index), self.result, self.detail
