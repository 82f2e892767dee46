"""What happens to a recording when calls, backward passes and optimizer steps come in.

The parts of the capture report here; from here rows go to the log, step by step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from gradtrace.capture import interception
from gradtrace.capture.calls import _inside_backward
from gradtrace.capture.clock import Belongs
from gradtrace.capture.log import StepLog
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.parameters import ParameterWatch
from gradtrace.capture.replay.passes import Passes
from gradtrace.capture.rows import Rows
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.watch.step import StepWatch
from gradtrace.capture.watch.thinning import as_watched

_MOST_ROWS = 100_000
"""A step with more rows than this (a long evaluation is part of the step in flight) is written in pieces."""
_MOST_WAITING = 20_000
"""An evaluation on an accelerator waits for the device after so many measures: there is no backward to do it."""
REPLACED = "step without a module call: the script has replaced nn.Module.__call__"
_NEVER_FIRED = "gradient never arrived (output unused, or changed in place)"


class Steps:
    """Closes steps and starts new ones. ``forget_step`` and ``never_fired`` belong to the engine in use."""

    def __init__(
        self,
        session: Session,
        parameters: ParameterWatch,
        never_fired: Callable[[], int],
        forget_step: Callable[[], None],
        passes: Passes,
        watch: StepWatch,
        on_step: Callable[[int], None],
    ) -> None:
        """``on_step`` is told of each step that begins."""
        self._watch = watch
        self.log: StepLog | None = None
        self._session = session
        self._parameters = parameters
        self._never_fired = never_fired
        self._forget_step = forget_step
        self._passes = passes
        self._on_step = on_step
        self._dirty = False
        self._may_wait = True
        self._lock = threading.RLock()
        session.clock.is_over = parameters.is_over
        session.clock.weights_changed = parameters.have_changed
        session.clock.on_backward = self._backward_starts

    # What the parts report -----------------------------------------------------------------------------------

    def outermost_call(self, entry: ModuleEntry, evaluating: bool, goes_on: Callable[[], bool]) -> None:
        """An outermost module call is about to start; ``goes_on`` tells whether it continues a graph."""
        session = self._session
        self._passes.call_begins(goes_on)
        if session.clock.starts_step(evaluating=evaluating, goes_on=goes_on):
            self._record_manual_update()
            self.close()
            self._next()
        elif len(session.rows) > _MOST_ROWS:
            self._write_piece(self._passes.in_incident)
        if evaluating and session.statistics.waiting > _MOST_WAITING:
            self._resolve()
        session.clock.outermost_call(evaluating=evaluating)
        self._dirty = True
        self._parameters.call_begins(entry.root)
        self._watch.call_begins(entry.root)

    def backward_ended(self, accumulating: bool, error: BaseException | None) -> None:
        """A backward pass has ended, by an error maybe: the one moment at which an accelerator is waited for."""
        self._dirty = True
        self._session.clock.backward_ended(accumulating=accumulating)
        if accumulating:
            self._watch.pass_ended()
        self._resolve()
        if accumulating:
            self._watch.pass_resolved(self._parameters.arrivals)
            self._passes.backward_ended(error)
        if len(self._session.rows) > _MOST_ROWS:  # of one graph that is gone through again and again
            self._write_piece(self._passes.in_incident)

    def loss_scale(self, number: int, scale: Tensor) -> None:
        """A GradScaler is about to step an optimizer."""
        with quiet():
            self._session.record("optimizer", None, "loss_scale", str(number), scale, once=False)

    def optimizer_stepped(self, optimizer: Optimizer, skipped: bool, inside_backward: bool) -> None:
        """An optimizer has stepped, or was skipped; threads that train at once end their steps one by one."""
        with self._lock:
            self._stepped(optimizer, skipped, inside_backward)

    def _stepped(self, optimizer: Optimizer, skipped: bool, inside_backward: bool) -> None:
        session, clock = self._session, self._session.clock
        self._dirty = True
        if not inside_backward:
            self._passes.optimizer_stepped(skipped=skipped)
        belongs = clock.optimizer_stepped(optimizer, inside_backward=inside_backward)
        if skipped:
            words = "GradScaler skipped the optimizer step"
            session.rows.append(clock.micro_step, "event", None, None, "skip", "", None, words)
        self._record_states(optimizer, is_whole=belongs is Belongs.THIS_STEP or clock.by_hand)
        if belongs is Belongs.THIS_STEP:
            self.close()
            self._next()
        elif belongs is Belongs.STEP_BEFORE:
            self._extend_step_before()

    def _record_states(self, optimizer: Optimizer, *, is_whole: bool) -> None:
        if not self._session.capturing:
            self._watch.updated()
        elif is_whole:
            self._parameters.record_states(optimizer)
        else:
            self._parameters.record_parameters_of(optimizer)

    def by_hand(self, number: int | None) -> None:
        """The user's loop says that what follows is another step."""
        self._session.clock.count_by_hand()
        if number == self._session.clock.step or (number is None and not self._dirty):
            return
        self.close()
        self._next(number)

    def optimizer_begins(self, optimizer: Optimizer, skipped: bool) -> None:
        """An optimizer is about to step, or has been skipped."""
        self._parameters.optimizer_begins(optimizer)
        if not skipped:
            self._session.clock.optimizer_begins()
            self._watch.update_begins()
        if not skipped and not _inside_backward():
            self._passes.optimizer_begins()

    def loss_scaled(self) -> None:
        """A GradScaler has scaled a loss: it will say whether the step is skipped."""
        self._passes.loss_scaled()

    # Closing -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The recording ends: write what is in flight."""
        self._passes.run_ends(at_once=False)
        self._record_manual_update()
        self._watch.run_ends()
        self._resolve()
        self._close_last()

    def end_at_once(self) -> None:
        """The process is about to die: write what can be written without a wait."""
        if self.log is not None and not self.log.busy:
            self._may_wait = False
            self._passes.run_ends(at_once=True)
            self._close_last()

    def _close_last(self) -> None:
        """Close the step in flight; an evaluation after the last step is none of its own."""
        clock = self._session.clock
        if clock.has_ticked and not clock.by_hand and self._session.rows.are_all("evaluation", "event"):
            self._extend_step_before()
        else:
            self.close()

    def close(self) -> None:
        """Hand the rows in flight to the log as the step's last."""
        session = self._session
        fired = self._never_fired()
        if fired:
            session.unmeasured[_NEVER_FIRED] += fired
        if session.clock.saw_no_call and not interception.is_in_place():
            session.unmeasured[REPLACED] += 1
        if self._may_wait and not session.clock.backward_in_step and session.statistics.waiting:
            self._resolve()
        in_incident = self._passes.step_ends()
        self._watch.step_ends(incident=in_incident)
        self._write_piece(in_incident)
        self._dirty = False

    def _write_piece(self, in_incident: bool) -> None:
        step = self._session.clock.step
        self._thin(step, in_incident)
        if self.log is not None:
            self.log.end_step(step, in_full=self._session.capturing and self._session.schedule.captures(step))

    def _thin(self, step: int, in_incident: bool) -> None:
        """Leave only what a watched step has, where one was captured since it might have belonged to another."""
        if not self._session.capturing or self._session.schedule.captures(step) or in_incident:
            self._parameters.rows_written()
        else:
            self._session.rows.exchange(as_watched)
            self._parameters.rows_dropped()

    def _extend_step_before(self) -> None:
        session = self._session
        in_incident = self._passes.part_ends()
        before = session.clock.step - 1
        shift = session.clock.continue_step_before()
        self._thin(before, in_incident)
        if self.log is not None:
            self.log.extend_step(before, shift)
        self._forget()

    def of_step_before(self, rows: Rows) -> None:
        """Write rows that turned out to belong to the step that has just ended."""
        if self.log is not None:
            self.log.add(self._session.clock.step - 1, rows)

    def _next(self, number: int | None = None) -> None:
        self._session.clock.next_step(number)
        self.step_begins()

    def step_begins(self) -> None:
        """A step begins: the first, or another one."""
        self._watch.step_begins(self._session.clock.step)
        self._forget()
        self._on_step(self._session.clock.step)

    def _forget(self) -> None:
        session = self._session
        session.statistics.forget()
        self._parameters.arrivals.forget()
        self._forget_step()
        session.capturing = session.active and self._is_to_be_seen(session.clock.step)

    def _is_to_be_seen(self, step: int) -> bool:
        session = self._session
        if session.schedule.captures(step):
            return True
        return session.clock.may_belong_before and session.schedule.captures(step - 1)

    def _record_manual_update(self) -> None:
        """Record what the script's own code has made of the parameters, there being no optimizer."""
        if not self._session.clock.updated_without_optimizer():
            return
        if self._session.capturing:
            self._parameters.record_states(None)
        else:
            self._watch.updated()

    def _backward_starts(self) -> None:
        if self._session.clock.awaits_first_tick:
            self._parameters.backward_begins()
        if self._session.capturing or self._session.clock.steps_in_backward:
            self._parameters.arrivals.watch()
        else:
            self._parameters.arrivals.rest()

    def _resolve(self) -> None:
        with quiet():
            self._session.statistics.resolve()
        if self.log is not None:
            self.log.write_late()
