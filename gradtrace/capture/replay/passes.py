"""The forward and backward passes of the step in flight: when to look for an incident, when to let go of them.

The weights must still be those of the pass when it is looked at, and what is kept of a pass must not pile up.
"""

from __future__ import annotations

from collections.abc import Callable

from gradtrace.capture.loss.watch import LossWatch
from gradtrace.capture.recheck.capsule_watch import CapsuleWatch
from gradtrace.capture.replay.alarm import Watchman
from gradtrace.capture.replay.kept import Keeper
from gradtrace.capture.rows import RowBuffer


class Passes:
    """Hears of calls, backward passes and optimizer steps, and has the watchman look in time."""

    def __init__(
        self, rows: RowBuffer, keeper: Keeper, watchman: Watchman, loss: LossWatch, capsule: CapsuleWatch | None
    ) -> None:
        self._rows = rows
        self._keeper = keeper
        self._loss = loss
        self._capsule = capsule
        self._watchman = watchman
        self._is_scaled = False

    def call_begins(self, goes_on: Callable[[], bool]) -> None:
        """An outermost call begins; unless it goes on with the graph, what came before may have been given up."""
        if self._watchman.is_suspicious and not (self._is_scaled or goes_on()):
            self._watchman.look()

    @property
    def in_incident(self) -> bool:
        """Whether an incident was noticed in the step in flight."""
        return self._watchman.in_incident

    def loss_scaled(self) -> None:
        """A GradScaler has scaled the loss: whether what comes matters is known when it steps or skips."""
        self._is_scaled = True

    def backward_ended(self, error: BaseException | None) -> None:
        """A pass that accumulates gradients has ended; an interrupted one is not looked at: somebody wants to go."""
        if error is not None:
            self._keeper.pass_fails()
        if error is not None and not isinstance(error, Exception):
            self._keeper.pass_ended()
        elif not self._is_scaled:
            self._look(raising=error is not None, reduced=error is None)
        elif not self._watchman.is_suspicious:
            self._keeper.pass_ended()

    def run_ends(self, *, at_once: bool) -> None:
        """The recording ends; ``at_once``: there is no time to look at anything."""
        self._watchman.run_ends(at_once=at_once)

    def optimizer_begins(self) -> None:
        """An optimizer is about to change the weights."""
        self._is_scaled = False
        self._look()

    def optimizer_stepped(self, *, skipped: bool) -> None:
        """An optimizer has stepped, or a GradScaler has skipped its step."""
        self._is_scaled = False
        self._look(skipped=skipped)

    def step_ends(self) -> bool:
        """The rows of the step are about to be written; return whether an incident was noticed in it."""
        self._is_scaled = False
        self._look()
        in_incident = self._watchman.in_incident
        self._keeper.step_ends(self._rows)
        self._watchman.step_ended()
        self._forget()
        return in_incident

    def part_ends(self) -> bool:
        """Rows that belong to the step before are about to be written; return as ``step_ends`` does."""
        self._look()
        self._keeper.step_ends(self._rows)
        self._watchman.part_ended()
        self._forget()
        return self._watchman.in_incident

    def _forget(self) -> None:
        self._loss.step_ended()
        if self._capsule is not None:
            self._capsule.step_ended()

    def _look(self, *, skipped: bool = False, raising: bool = False, reduced: bool = False) -> None:
        try:
            self._watchman.look(skipped=skipped, raising=raising, reduced=reduced)
        finally:
            self._keeper.pass_ended()
