"""A step that is only watched, as the parts of the capture report it; and what is learned for the schedule.

What is looked at: the outputs of outermost calls (``calls.py`` of the capture reports them), the loss, the gradients
when a pass has ended, buffers and parameters after the update. Rows of what is finite are left out, but for the loss,
learning rates and the norm of all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradtrace.capture.arrivals import Arrivals
from gradtrace.capture.names import Root
from gradtrace.capture.parameters import ParameterWatch
from gradtrace.capture.rows import Row, Rows
from gradtrace.capture.session import Session
from gradtrace.capture.watch.baseline import Baseline
from gradtrace.capture.watch.gradients import GradientWatch
from gradtrace.capture.watch.states import StateWatch
from gradtrace.capture.watch.tensors import WatchedTensors
from gradtrace.capture.watch.triggers import WatchSchedule


class StepWatch:
    """Watches the steps that are not captured in full. ``schedule`` is None where it is settled which those are."""

    def __init__(
        self,
        session: Session,
        states: ParameterWatch,
        schedule: WatchSchedule | None,
        baseline: Baseline | None,
        of_step_before: Callable[[Rows], None],
    ) -> None:
        self._session = session
        self._schedule = schedule
        self._baseline = baseline
        self._compared = 0
        tensors = WatchedTensors(session.names)
        self._gradients = GradientWatch(session, tensors)
        self._states = StateWatch(session, states, tensors, of_step_before)
        self.weights_are_bad = False
        """Whether a parameter was found to be non-finite before the step's pass."""

    @property
    def is_on(self) -> bool:
        """Whether the step in flight is only watched."""
        return self._session.active and not self._session.capturing

    # What happens in a step ---------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """Decide whether the step is captured in full, and say why if that is another way than before."""
        self.weights_are_bad = False
        words = None if self._schedule is None else self._schedule.switch(step)
        if words is not None:
            session = self._session
            session.rows.append(session.clock.micro_step, "event", None, None, "switch", "", None, words)

    def call_begins(self, root: Root) -> None:
        """An outermost call begins."""
        if self.is_on:
            self._states.call_begins(root)

    def pass_ended(self) -> None:
        """A pass that accumulates gradients has ended; the numbers have not been brought over yet."""
        if self.is_on:
            self._gradients.pass_ended()

    def pass_resolved(self, arrivals: Arrivals) -> None:
        """The numbers of a pass are here; an optimizer that steps inside of it has left nothing else to be read."""
        if self.is_on and self._session.clock.steps_in_backward:
            self._gradients.arrived(arrivals.take())

    def returned(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """``autograd.grad`` has returned gradients of these tensors."""
        names = self._session.names
        known = [(entry, gradient) for tensor, gradient in gradients if (entry := names.parameter(tensor)) is not None]
        self._gradients.look([(entry, gradient) for entry, gradient in known if entry.owner.selected])

    def update_begins(self) -> None:
        """An optimizer is about to update its parameters."""
        if self.is_on:
            self._gradients.update_begins()

    def updated(self) -> None:
        """The weights have been updated."""
        if self.is_on:
            self._states.updated()

    def look_at_weights(self) -> None:
        """Something is not finite: find out whether a parameter was so before."""
        if self.is_on and not self.weights_are_bad:
            self.weights_are_bad = self._states.look_at_all()

    def run_ends(self) -> None:
        """The recording ends: no later step will find what nothing has used."""
        if self.is_on:
            self._states.look_for_the_last_time()

    def step_ends(self, *, incident: bool) -> None:
        """The step's rows are about to be written: what the schedule learns from them."""
        if self._schedule is None:
            return
        self._compare_models(self._schedule)
        facts = _Facts.of(self._session.rows.between(0))
        self._schedule.observe(
            self._session.clock.step,
            loss=facts.loss,
            gradient_norm=facts.gradient_norm,
            rates=facts.rates,
            incident=incident,
        )

    def _compare_models(self, schedule: WatchSchedule) -> None:
        """Find out whether the model is that of the earlier run, as far as it has been called."""
        names = self._session.names
        if self._baseline is None or names.count == self._compared:
            return
        self._compared = names.count
        names.freeze()
        words = self._baseline.difference(names.module_table())
        if words is not None:
            schedule.model_differs(words)
            self._baseline = None


@dataclass
class _Facts:
    """What the schedule wants to know of a step."""

    loss: float | None = None
    gradient_norm: float | None = None
    rates: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> _Facts:
        """Gather it from the step's rows; of a captured step the norm is that of the gradients that arrived."""
        facts, squares = cls(), []
        for row in rows:
            measure = row.measure
            if measure is None or measure.pending:
                continue
            if row.tensor == "grad" and row.phase == "backward":
                squares.append((measure.norm or 0.0) ** 2)
            elif row.tensor == "loss" and measure.numel == 1:
                facts.loss = measure.max
            elif row.tensor == "grad_norm":
                facts.gradient_norm = measure.max
            elif row.tensor == "lr" and measure.max is not None:
                facts.rates[row.path] = measure.max
        if facts.gradient_norm is None and squares:
            facts.gradient_norm = math.sqrt(sum(squares))
        return facts
