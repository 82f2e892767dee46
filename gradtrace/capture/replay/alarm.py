"""Notices an incident while the training runs: says so, has the pass replayed, and may stop the run.

Looks at the rows in flight at the end of a backward pass, before the optimizer changes anything; with an enabled
GradScaler when it is known whether the step is skipped; without a backward at the next call or step. Which rows
matter is the business of ``trace/incident.py``, and how a pass is replayed that of ``rerun.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradtrace.capture.loss.watch import LossWatch
from gradtrace.capture.operations.births import Birth
from gradtrace.capture.recheck.capsule_watch import CapsuleWatch
from gradtrace.capture.replay.agreement import Agreement
from gradtrace.capture.replay.filling import fill_in
from gradtrace.capture.replay.kept import Keeper
from gradtrace.capture.replay.rerun import Outcome, Replayer
from gradtrace.capture.rows import Named, Row, record_of
from gradtrace.capture.session import Session
from gradtrace.capture.voice import warn
from gradtrace.capture.watch.step import StepWatch
from gradtrace.errors import NonFiniteError
from gradtrace.trace.confirmation import Confirmation
from gradtrace.trace.incident import IncidentFinder, looks_like_mask

OnNonFinite = Literal["continue", "stop"]

_MOST_SAID = 20
"""Of a run that fails again and again, so many incidents are said when they are noticed; all are recorded."""
_THE_LAST = "; more incidents will be recorded without a word"
_MOST_TOLERATED = 10_000
"""Paths may be others in each step."""

_Key = tuple[Named | None, str, str]


@dataclass(frozen=True)
class Alarm:
    """What there is to say at the moment at which an incident is noticed."""

    step: int
    first: Row | None
    """None where nothing of this rank's own was non-finite."""
    reached: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line."""
        what = ", ".join({"grad": "gradients", "output": "the model's output"}.get(w, w) for w in self.reached)
        row = self.first
        if row is None:
            return f"step {self.step}: {what} not finite; another rank's came in when they were added up"
        where = "outside any module" if row.owner is None else row.owner.name or "(root)"
        place = f"{where}, {row.tensor} {row.path}".rstrip()
        return f"step {self.step}: {what} not finite; first non-finite: {place}"


class Watchman:
    """Raises the alarm once a step, and looks after what it costs: ``replays`` in all.

    One replay is kept back for an incident that will not heal by itself: bad gradients that the optimizer is about
    to use, or a second bad step in a row.
    """

    def __init__(
        self,
        session: Session,
        keeper: Keeper,
        replayer: Replayer,
        loss: LossWatch,
        capsule: CapsuleWatch | None,
        notes: list[str],
        *,
        replays: int,
        on_nonfinite: OnNonFinite,
        agreement: Agreement,
        verdict_command: Callable[[], str],
        watch: StepWatch,
    ) -> None:
        """``notes`` are those of the run; ``agreement`` says whether stopping now is safe."""
        self._watch = watch
        self._session = session
        self._keeper = keeper
        self._replayer = replayer
        self._loss = loss
        self._capsule = capsule
        self._notes = notes
        self._replays = replays
        self._on_nonfinite = on_nonfinite
        self._agreement = agreement
        self._verdict_command = verdict_command
        self._made: dict[_Key, int] = {}
        self._tolerated: set[_Key] = set()
        self._said = 0
        self._step_from = self._looked_until = 0
        self._alarm: Alarm | None = None
        """That of the step in flight."""
        self._skipped = False
        self._lasting = False
        self._weights_were_bad = False
        self._is_blind = False

    @property
    def in_incident(self) -> bool:
        """Whether an alarm was raised in the step in flight."""
        return self._alarm is not None

    @property
    def is_suspicious(self) -> bool:
        """Whether something non-finite has been seen in the step that no alarm was raised for."""
        return self._session.statistics.saw_nonfinite and self._alarm is None and not self._is_blind

    def run_ends(self, *, at_once: bool) -> None:
        """Nothing can be stopped any more; ``at_once``: there is no time to look at anything either."""
        self._on_nonfinite = "continue"
        self._is_blind = at_once

    def look(self, *, skipped: bool = False, raising: bool = False, reduced: bool = False) -> None:
        """Look at the step in flight.

        ``skipped`` says that a GradScaler has skipped the optimizer's step, ``raising`` that an error is on its way
        to the user, ``reduced`` that the gradients are those that a backward pass has just left.

        Raises:
            NonFiniteError: there is an incident, and the run is to stop then.
        """
        self._skipped = skipped or self._skipped
        is_new = self._sound(self._skipped)
        if self._on_nonfinite != "stop" or raising:
            return
        # Of several ranks those that have seen nothing stop too, and at the same place.
        if (reduced and self._agreement.all_see_bad_gradients()) if self._agreement.is_needed else is_new:
            self._stop()

    def _sound(self, skipped: bool) -> bool:
        """Raise the alarm if there is an incident that none was raised for; say whether there is."""
        if not self.is_suspicious:
            return False
        if not self._reached(self._new_bad_rows(), skipped):
            return False
        step, bad = self._session.clock.likely_step, self._bad_rows_here()
        reached = self._reached(bad, skipped)
        self._session.names.freeze()
        is_fatal = "grad" in reached and not skipped
        first, outcome = self._first(bad), None
        if self._watch.is_on:
            outcome = self._see_in_full(first, is_fatal=is_fatal)
            first = self._first(self._bad_rows_here())
        self._alarm = Alarm(step, first, reached)
        if not self._lasting:
            self._say(self._alarm)
            self._save(first)
        self._confirm(first, outcome or self._replay(first, is_fatal=is_fatal))
        return True

    def _reached(self, bad: Sequence[Row], skipped: bool) -> tuple[str, ...]:
        """Return which of output, loss and grad these rows say to be non-finite, where it matters."""
        if not bad:
            return ()
        step, roots = self._session.clock.likely_step, {root.name for root in self._session.names.roots}
        records = [record_of(row, step, 0) for row in bad]
        return tuple(IncidentFinder(roots).reached_before_update(records, skipped=skipped))

    def _see_in_full(self, first: Row, *, is_fatal: bool) -> Outcome:
        """Replay a step that was only watched, and give it the rows that it would have left."""
        self._watch.look_at_weights()
        outcome = self._replay(first, is_fatal=is_fatal)
        if outcome.seen:
            is_reduced = any(run.kept.reducer is not None for run in outcome.seen)
            fill_in(self._session.rows, outcome.seen, is_reduced=is_reduced)
        return outcome

    def _say(self, alarm: Alarm) -> None:
        self._event("incident", alarm.text)
        self._said += 1
        if self._said <= _MOST_SAID:
            warn(alarm.text + (_THE_LAST if self._said == _MOST_SAID else ""))

    def _stop(self) -> None:
        alarm = self._alarm
        if alarm is None:
            alarm = self._alarm = Alarm(self._session.clock.likely_step, None, ("grad",))
            self._say(alarm)
        self._event("stop", "stopped before the optimizer's step, as asked")
        raise NonFiniteError(f"{alarm.text}; for the verdict: {self._verdict_command()}", alarm.step)

    def part_ended(self) -> None:
        """Rows are about to be written; what was non-finite in a healthy step is tolerated later."""
        bad = self._bad_rows() if self._session.statistics.saw_nonfinite else []
        self._weights_were_bad = any(row.tensor == "param" for row in bad)
        if self._alarm is None and len(self._tolerated) < _MOST_TOLERATED:
            self._tolerated |= {_key(row) for row in bad}
        self._session.statistics.saw_nonfinite = False
        self._step_from = self._session.rows.position

    def step_ended(self) -> None:
        """All rows of the step are about to be written."""
        self.part_ended()
        self._lasting, self._alarm, self._skipped = self._alarm is not None, None, False

    def _bad_rows(self) -> list[Row]:
        return list(filter(_is_bad, self._session.rows.between(self._step_from)))

    def _new_bad_rows(self) -> list[Row]:
        """Return the rows that are yet to be judged: a step of many passes would have the same ones judged over again.

        What is not known yet, or belongs to another thread, is to be judged later.
        """
        end = self._session.rows.position
        rows = self._session.rows.between(max(self._step_from, self._looked_until))
        if not self._keeper.roots_elsewhere:
            self._looked_until = next((row.seq for row in rows if row.pending), end)
        return self._here(list(filter(_is_bad, rows)))

    def _bad_rows_here(self) -> list[Row]:
        return self._here(self._bad_rows())

    def _here(self, rows: list[Row]) -> list[Row]:
        """Leave out what another thread is in the middle of: it is looked at when its pass has ended."""
        elsewhere = self._keeper.roots_elsewhere
        return [row for row in rows if row.owner and _root_of(row) not in elsewhere] if elsewhere else rows

    def _first(self, bad: Sequence[Row]) -> Row:
        step = self._session.clock.step
        fresh = (
            row for row in bad if _key(row) not in self._tolerated and not looks_like_mask(record_of(row, step, 0))
        )
        return next(fresh, bad[0])

    def _save(self, first: Row) -> None:
        if self._capsule is not None and not _came_in(first):
            rows = self._session.rows.between(self._step_from)
            said = self._capsule.incident(self._keeper.calls, first, rows)
            self._notes += [] if said is None else [said]

    def _confirm(self, first: Row, outcome: Outcome) -> None:
        said = outcome.confirmation
        if self._lasting and said.status == "not_replayed":
            return  # nothing new: what the incident began with has been written
        in_loss = self._loss.finding()
        for birth in [*in_loss.births, *outcome.births]:
            self._write(birth, first.micro_step)
        if not outcome.births:
            said = replace(
                said, reason="; ".join(filter(None, (said.reason, in_loss.reason, self._unseen(first)))) or None
            )
        self._event("replay", replace(said, term=in_loss.term, place=in_loss.place).to_json())

    def _replay(self, first: Row, *, is_fatal: bool) -> Outcome:
        key = _key(first)
        left = self._replays - len(self._made)
        if self._replays == 0:
            reason = "replays were switched off"
        elif _came_in(first):
            reason = "the gradients were finite when they arrived: another rank's came in, or the script changed them"
        elif self._weights_were_bad or self._watch.weights_are_bad:
            reason = "the weights were not finite any more"
        elif key in self._made and not self._watch.is_on:  # of a watched step the boundary is not known before
            reason = f"the same boundary was replayed at step {self._made[key]}"
        elif left <= 0:
            reason = f"{len(self._made)} of {self._replays} replays were used by then"
        elif left == 1 and not (is_fatal or self._lasting):
            reason = "the last replay is kept back for an incident that does not heal"
        else:
            outcome = self._replayer.replay(self._keeper)
            if outcome.ran:
                self._made[key] = self._session.clock.likely_step
            return outcome
        return Outcome(Confirmation("not_replayed", reason))

    def _unseen(self, first: Row) -> str | None:
        """Say where the loss code is, if it may have made the value and none of its lines were noted."""
        calls = self._keeper.calls
        may_be_loss_code = first.tensor in ("loss", "grad_output", "grad") and not self._watch.weights_are_bad
        if not (self._watch.is_on and may_be_loss_code and calls):
            return None
        span = self._loss.span(calls[-1].lines)
        return span and f"this step was only watched, so the lines of its loss code, {span}, were not told apart"

    def _write(self, birth: Birth, micro: int) -> None:
        rows = self._session.rows
        source = (birth.op, *birth.where)
        for tensor, path, measure, detail in birth.rows():
            rows.append(micro, "replay", birth.owner, birth.call, tensor, path, measure, detail=detail, source=source)

    def _event(self, name: str, words: str) -> None:
        self._session.rows.append(self._session.clock.micro_step, "event", None, None, name, "", None, words)


def _came_in(row: Row) -> bool:
    """Whether a gradient arrived finite here: another rank has made the value, or the script's own code."""
    return row.tensor == "grad" and row.phase == "optimizer"


def _is_bad(row: Row) -> bool:
    """Whether a tensor of the run's own is known not to be finite."""
    measure = row.measure
    if measure is None or row.tensor == "grad_norm" or row.source is not None:
        return False
    return not (measure.pending or measure.finite)


def _root_of(row: Row) -> Any:
    """Return the root of the module, or of the tensor's module, that a row belongs to."""
    return getattr(getattr(row.owner, "owner", row.owner), "root", None)


def _key(row: Row) -> _Key:
    return row.owner, row.tensor, row.path
