"""Parameters and buffers in steps that are only watched.

A look at everything after each update would double the cost of watching. A parameter that is in use and has gone
non-finite shows in the outputs, the loss or the gradients of the next step, so that is when all of them are looked
at; one that is not in use is found by looking at a share of them in each step. Buffers are few and small. Only what
is not finite leaves a row.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gradtrace.capture.held import TensorEntry
from gradtrace.capture.measures import Measure
from gradtrace.capture.names import ModuleEntry, Root
from gradtrace.capture.parameters import ParameterWatch
from gradtrace.capture.rows import Rows
from gradtrace.capture.session import CANNOT_MEASURE, Session, quiet
from gradtrace.capture.watch.tensors import Pairs, WatchedTensors, by_device, versions
from gradtrace.trace.incident import NO_GRADIENT
from gradtrace.trace.sent import let_pass

SHARES = 8
"""A parameter that nothing uses is looked at in one of so many steps."""

_LARGE = 65_536
"""Buffers of more elements are looked at only when they have been changed."""


class StateWatch:
    """Looks after parameters and buffers between captured steps.

    ``of_step_before`` writes rows that belong to the step that has just ended.
    """

    def __init__(
        self,
        session: Session,
        states: ParameterWatch,
        tensors: WatchedTensors,
        of_step_before: Callable[[Rows], None],
    ) -> None:
        self._session = session
        self._states = states
        self._tensors = tensors
        self._of_step_before = of_step_before
        self._begun: weakref.WeakSet[Root] = weakref.WeakSet()
        self._share = itertools.cycle(range(SHARES))
        self._updated: dict[int, int] = {}
        """Versions of the parameters, by their ids, as the last update has left them."""
        self._without_gradient: set[int] = set()
        self._settled: dict[tuple[ModuleEntry, str], _Settled] = {}
        """Large buffers, and masks that were infinite from the start: looked at again only once they have changed."""

    def call_begins(self, root: Root) -> None:
        """Record what is not finite when a root is called for the first time."""
        if root in self._begun:
            return
        self._begun.add(root)
        self._tensors.refresh()
        everything = (*self._tensors.parameters(), *self._tensors.buffers())
        self._look([pair for pair in everything if pair[0].owner.root is root], self._judge_start)

    def updated(self) -> None:
        """The weights have been updated: look at the buffers and at a share of the parameters."""
        parameters = self._tensors.parameters()
        tensors = [tensor for _, tensor in parameters]
        self._updated = dict(zip(map(id, tensors), versions(tensors), strict=True))
        self._without_gradient = {id(tensor) for _, tensor in parameters if tensor.grad is None}
        share = next(self._share)
        first, last = (len(parameters) * n // SHARES for n in (share, share + 1))
        again = [pair for pair in (*parameters[:first], *parameters[last:]) if self._states.is_known_bad(pair[0])]
        buffers = self._tensors.buffers()
        judge = functools.partial(self._judge, self._session.clock.step)
        pairs = (*parameters[first:last], *again, *buffers)
        self._look([pair for pair in pairs if not self._is_settled(*pair)], judge)
        if self._settled:
            self._repeat([pair for pair in buffers if self._is_settled(*pair)])

    def look_at_all(self) -> bool:
        """Record which parameters have become non-finite since they were last looked at; say whether any has.

        Waits for an accelerator. What the last update has made belongs to the step before, what the script has
        changed since then to this one.
        """
        with quiet():
            bad = self._newly_bad()
            self._record_of_step_before([pair for pair in bad if self._is_as_updated(pair[1])])
            for entry, tensor in bad:
                if not self._is_as_updated(tensor):
                    self._states.record_state("forward", entry, tensor)
        return bool(bad)

    def look_for_the_last_time(self) -> None:
        """Record which parameters the last update has left non-finite."""
        with quiet():
            self._record_of_step_before([pair for pair in self._newly_bad() if self._is_as_updated(pair[1])])

    def _newly_bad(self) -> Pairs:
        parameters = [pair for pair in self._tensors.parameters() if not self._states.is_known_bad(pair[0])]
        return [pair for pair in parameters if self._session.is_finite(pair[1]) is False]

    def _is_as_updated(self, tensor: Tensor) -> bool:
        return self._updated.get(id(tensor)) == _version(tensor)

    def _look(self, pairs: Pairs, judge: Callable[[Pairs, Pairs], None]) -> None:
        """Have ``judge`` called with what was looked at and with those that are not finite, maybe later."""
        with quiet():
            for group in by_device(pairs).values():
                then = functools.partial(self._sift, group, judge)
                try:
                    self._session.statistics.norms([tensor for _, tensor in group], then)
                except CANNOT_MEASURE as error:  # one of them cannot be read
                    let_pass(error)
                    then([math.nan] * len(group))

    def _sift(self, group: Pairs, judge: Callable[[Pairs, Pairs], None], norms: Sequence[float]) -> None:
        with quiet():
            suspects = [pair for pair, norm in zip(group, norms, strict=True) if not math.isfinite(norm)]
            judge(group, [pair for pair in suspects if self._session.is_finite(pair[1]) is False])

    def _judge_start(self, group: Pairs, bad: Pairs) -> None:
        for entry, tensor in bad:
            self._settle(entry, tensor, self._states.record_state("input", entry, tensor))

    def _judge(self, step: int, group: Pairs, bad: Pairs) -> None:
        """Record what was not finite after step ``step``."""
        with quiet():
            if any(entry.kind == "param" for entry, _ in bad):
                bad = self._all_bad()  # the others went with it
            if step != self._session.clock.step:  # an accelerator's numbers come a step later
                self._record_of_step_before(bad)
            else:
                self._record_updated(bad)
        for entry, tensor in group:
            if not any(tensor is other for _, other in bad):
                self._states.turned_finite(entry)
                if tensor.numel() > _LARGE:
                    self._settle(entry, tensor)

    def _all_bad(self) -> list[tuple[TensorEntry, Tensor]]:
        everything = (*self._tensors.parameters(), *self._tensors.buffers())
        return [
            pair for pair in everything if not self._is_settled(*pair) and self._session.is_finite(pair[1]) is False
        ]

    def _record_of_step_before(self, pairs: Pairs) -> None:
        if not pairs:
            return
        rows = self._session.rows
        start = rows.position
        self._record_updated(pairs)
        self._of_step_before(rows.withdraw(start))

    def _record_updated(self, pairs: Pairs) -> None:
        for entry, tensor in pairs:
            detail = NO_GRADIENT if id(tensor) in self._without_gradient else None
            self._states.record_state("optimizer", entry, tensor, detail)

    def _settle(self, entry: TensorEntry, tensor: Tensor, bad: Measure | None = None) -> None:
        if entry.kind == "buffer":
            self._settled[entry.owner, entry.name] = _Settled(_version(tensor), bad)

    def _is_settled(self, entry: TensorEntry, tensor: Tensor) -> bool:
        settled = self._settled.get((entry.owner, entry.name)) if self._settled else None
        return settled is not None and settled.version == _version(tensor)

    def _repeat(self, buffers: Pairs) -> None:
        """Say again what is not finite and has not changed: what has no row is taken to be finite."""
        rows, micro_step = self._session.rows, self._session.clock.micro_step
        for entry, _ in buffers:
            bad = self._settled[entry.owner, entry.name].bad
            if bad is not None:
                rows.append(micro_step, "optimizer", entry.owner, None, entry.kind, entry.name, bad)


class _Settled(NamedTuple):
    """A buffer's version when it was looked at, and what was found if it was not finite."""

    version: int
    bad: Measure | None


def _version(tensor: Tensor) -> int:
    return versions([tensor])[0]
