"""One step's records in order of ``seq``, and what they tell of calls: who called whom, what came of it.

Pure: rows in, answers out. Which record is the cause is decided in ``classify``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

from gradtrace.analysis.labels import names_above
from gradtrace.trace.schema import Record

FORWARD_PHASES = frozenset({"input", "forward", "evaluation", "recompute"})


class Call(NamedTuple):
    """One call of one module; ``again`` is true for a checkpoint's recomputation of it."""

    micro_step: int
    module: str
    call: int
    again: bool = False


def is_bad(row: Record) -> bool:
    """Whether the record holds a non-finite element."""
    return row.nonfinite_count > 0


def kind_of(row: Record) -> str:
    """Return "NaN", "Infinity" or "-Infinity": the worst that the record holds."""
    if row.nan_count:
        return "NaN"
    return "Infinity" if row.posinf_count else "-Infinity"


def is_forward(row: Record) -> bool:
    """Whether the record was taken where a tensor enters or leaves a module in the forward direction."""
    return row.phase in FORWARD_PHASES and row.tensor in ("input", "output")


def is_backward(row: Record) -> bool:
    """Whether the record was taken where a gradient enters or leaves a module."""
    return row.tensor in ("grad_output", "grad_input")


def call_of(row: Record) -> Call | None:
    """Return the call that the record belongs to, None for what belongs to no call."""
    if row.module is None or row.call is None or not (is_forward(row) or is_backward(row)):
        return None
    return Call(row.micro_step, row.module, row.call, row.phase == "recompute")


def lies_within(module: str | None, outer: str) -> bool:
    """Whether ``module`` is ``outer`` or lies below it, by name."""
    return module is not None and (outer == "" or module == outer or module.startswith(outer + "."))


def _signature(row: Record) -> tuple[object, ...]:
    """Return what two records of the same tensor have in common: shape, counts and finite statistics."""
    counts = (row.nan_count, row.posinf_count, row.neginf_count)
    return (row.dtype, row.shape, row.numel, *counts, row.min, row.max, row.norm)


class Scene:
    """The records of one step of one rank, oldest first.

    ``until`` is the ``seq`` of the record that mattered, by default the last: ``bad`` holds the non-finite
    records up to it. ``roots`` are the names of the outermost modules, ``modules`` the names of all.
    """

    def __init__(
        self,
        rows: Sequence[Record],
        roots: Collection[str],
        modules: Collection[str] = (),
        until: int | None = None,
    ) -> None:
        self.rows = list(rows)
        self.bad = [row for row in self.rows if is_bad(row) and (until is None or row.seq <= until)]
        self._names = frozenset(modules)
        self._roots = frozenset(roots)
        self._by_call: dict[Call, list[Record]] = defaultdict(list)
        self._takers: dict[tuple[object, ...], list[Record]] = defaultdict(list)
        for row in self.rows:
            call = call_of(row)
            if call is not None:
                self._by_call[call].append(row)
                if row.tensor == "input" and is_bad(row):
                    self._takers[_signature(row)].append(row)
        self._parents = _parents(self.rows, self._roots)

    @cached_property
    def _called(self) -> frozenset[str]:
        return frozenset(call.module for call in self._by_call)

    def of_call(self, call: Call, tensor: str) -> list[Record]:
        """Return the call's records of ``tensor``: input, output, grad_output or grad_input."""
        return [row for row in self._by_call.get(call, ()) if row.tensor == tensor]

    def enclosing(self, row: Record) -> Call | None:
        """Return the call during which the record's own call was made; None for an outermost one."""
        call = call_of(row)
        if call is None or call.module in self._roots:
            return None
        return self._parents.get(call) or self._parents.get(call._replace(again=False))

    def enclosing_module(self, row: Record) -> str | None:
        """Return the module whose code called the record's module; None outside any module."""
        call = self.enclosing(row)
        if call is not None:
            return call.module
        if row.module is None or row.module in self._roots:
            return None
        return nearest_above(row.module, self._names)

    def takers(self, row: Record) -> list[Call]:
        """Return the calls that took the tensor of this record as an input after it."""
        calls = [call_of(taker) for taker in self._takers.get(_signature(row), ()) if taker.seq >= row.seq]
        return list(dict.fromkeys(call for call in calls if call is not None))

    def was_called(self, module: str) -> bool:
        """Whether the module was called in these records."""
        return module in self._called


def nearest_above(module: str, names: Collection[str]) -> str | None:
    """Return the nearest module above ``module`` among ``names``, by name."""
    return next((name for name in names_above(module) if name in names), None)


def _parents(rows: Sequence[Record], roots: Collection[str]) -> dict[Call, Call | None]:
    """Read the nesting of calls from the order of records: inputs on entry, outputs on exit."""
    parents: dict[Call, Call | None] = {}
    stack: list[Call] = []
    places: dict[Call, int] = {}
    for row in rows:
        call = call_of(row) if is_forward(row) else None
        if call is None:
            continue
        if row.tensor == "output" and call in places:
            for closed in stack[places[call] :]:
                del places[closed]
            del stack[len(places) :]
        elif call not in parents:
            if call.module in roots:
                stack.clear()  # whatever is still open was left by an exception
                places.clear()
            parents[call] = stack[-1] if stack else None
            if row.tensor == "input":
                places[call] = len(stack)
                stack.append(call)
    return parents
