"""Hands finished steps to the writer and keeps the run's own counts.

Rows whose numbers are still on an accelerator wait here until the next look at the device, and what comes
after them waits too: the file is in the order of ``seq``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

from gradtrace.capture.incident_watch import IncidentWatch
from gradtrace.capture.rows import Rows
from gradtrace.capture.session import Session
from gradtrace.capture.slow_disk import SlowDisk
from gradtrace.capture.voice import warn
from gradtrace.errors import CannotWriteError
from gradtrace.trace.pace import Pace
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.sent import let_pass
from gradtrace.trace.trouble import in_words
from gradtrace.trace.writer import RunWriter

_QUICK = 0.01
"""Seconds in which the facts of most runs are written. If it takes longer, since a run has thousands of modules ..."""
_REST = 20
"""... and goes on making new ones, so many times as long is waited until they are written again."""


class StepLog:
    """The written side of a recording."""

    def __init__(self, session: Session, writer: RunWriter, info: RunInfo, pace: Pace | None = None) -> None:
        self.writer = writer
        writer.on_thinned = warn
        self.closed = False
        self.busy = False
        """Whether rows are being handed over: a signal handler must not hand over others then."""
        self._lock = threading.RLock()  # backward passes of several threads end here
        self._session = session
        self._info = info
        self._late: list[tuple[int, datetime, bool, Rows]] = []
        self._times: tuple[int, datetime] | None = None
        self._root_names: set[str] = set()
        self._incidents = IncidentWatch(self._root_names, info.rank)
        self._slow_disk = SlowDisk(pace or Pace(), self._root_names)
        self._current: int | None = None
        self._captured: int | None = None
        self._modules_told = 0
        self._rests_until = 0.0

    def end_step(self, step: int, *, in_full: bool) -> None:
        """Write the rows in flight as rows of ``step``, which was captured ``in_full`` or only watched."""
        with self._lock:
            rows = self._session.rows.take()
            if len(rows) and in_full and step != self._captured:
                self._captured = step
                self._info.captured += 1
            self._write(step, rows)

    def extend_step(self, step: int, shift: int) -> None:
        """Write the rows in flight as more rows of ``step``, their micro steps moved up by ``shift``."""
        with self._lock:
            self._write(step, self._session.rows.take().moved(shift))

    def add(self, step: int, rows: Rows) -> None:
        """Write these rows, which are not in flight any more, as more rows of ``step``."""
        with self._lock:
            self._write(step, rows)

    def write_late(self) -> None:
        """Write the rows that waited for their numbers, up to the first that still waits."""
        with self._lock:
            self.busy = True
            try:
                self._write_ready()
            finally:
                self.busy = False

    def _write_ready(self) -> None:
        while self._late:
            step, time, in_full, rows = self._late.pop(0)
            ready, waiting = rows.ready()
            if len(waiting):
                self._late.insert(0, (step, time, in_full, waiting))
            self._write_now(step, time, ready.to_be_written(), in_full=in_full)
            if len(waiting):
                break

    def _write(self, step: int, rows: Rows) -> None:
        if not len(rows):
            return
        self._session.names.freeze()
        self._late.append((step, self._time_of(step), step == self._captured, rows))
        self.write_late()

    def _time_of(self, step: int) -> datetime:
        """Return the time at which a step ended; what is added to it later has the same."""
        if self._times is None or self._times[0] != step:
            self._times = (step, datetime.now(timezone.utc))
        return self._times[1]

    def _write_now(self, step: int, time: datetime, rows: Rows, *, in_full: bool) -> None:
        if not len(rows):
            return
        if step != self._current:
            self._finish_step()
        with self._writing(step):
            rows, kind = self._slow_disk.fitting(step, rows, in_full=in_full)
            batch = self._session.rows.batch(rows, step, time)
            self._slow_disk.pace.begins()
            self.writer.write(batch)
            self._info.captured -= self._slow_disk.written(step, kind)
        self._info.records += len(rows)
        if step != self._current:
            self._current = step
            self._info.steps += 1
            self._info.last_step = step
        self._incidents.add(step, rows)
        self._tell_facts(step)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Say of what cannot be written in ``step`` what it means for the recording."""
        try:
            yield
        except OSError as error:
            let_pass(error)
            reason = in_words(error)
            words = f"recording stopped at step {step}: {reason}; the training goes on; {self._kept()}"
            raise CannotWriteError(words, reason) from error

    def unfinished(self, error: Exception) -> str:
        """Return what to say when ``close`` has raised ``error``."""
        reason = in_words(error) if isinstance(error, OSError) else " ".join(str(error).split())
        return f"the recording could not be finished: {reason}; {self._kept()}"

    def _kept(self) -> str:
        where, steps = self.writer.run_path, self._info.steps
        if not self.writer.is_in_place:
            return f"nothing is left at {where}"
        if not steps:
            return "no step was recorded"
        kept = f"step {self._info.last_step}" if steps == 1 else f"the {steps:,} steps up to {self._info.last_step}"
        return f"{kept} can be read from {where}"

    def stopped(self, end: str) -> None:
        """The recording is over before the training: let those who read it know at once, if that can be written."""
        self._info.end = end
        self.writer.update(self._info)

    def _tell_facts(self, step: int) -> None:
        """Let a run that is being recorded, or was killed, know its modules, and that it has thinned steps."""
        count, begun = self._session.names.count, time.monotonic()
        is_thinned, begins = self._slow_disk.has_news(), not self._info.paced
        are_new = count != self._modules_told and begun >= self._rests_until
        if not (are_new or is_thinned):
            return
        if are_new:
            self._modules_told = count
            self._info.modules = self._session.names.module_table()
        self._slow_disk.tell(self._info)
        with self._writing(step):
            self.writer.update(self._info)
        took = time.monotonic() - begun
        if took > _QUICK:
            self._rests_until = begun + _REST * took
        if is_thinned and begins:
            warn(self._slow_disk.beginning())

    def _finish_step(self) -> None:
        if self._current is None:
            return
        self._root_names.update(root.name for root in self._session.names.roots)
        self._session.names.forget_the_gone()
        incident = self._incidents.step_ends(self._current)
        if incident is not None:
            # Ten skips in a row are an incident that began with the first of them.
            self.writer.protect(incident.first_step)
            self.writer.protect(self._current)
            self._slow_disk.protect(self._current)

    def complete_info(self) -> None:
        """Fill in what is known of the run when it ends."""
        self._finish_step()
        info, session = self._info, self._session
        self._slow_disk.tell(info)
        if (note := self._slow_disk.note()) is not None:
            info.notes.append(note)
        info.incidents = self._incidents.count
        info.unmeasured = dict(session.unmeasured)
        session.names.freeze()
        info.modules = session.names.module_table()
        info.notes += [f"pattern {pattern!r} matched no module" for pattern in session.names.unmatched_patterns()]

    def close(self, end: str, *, quickly: bool) -> None:
        """Finish the file.

        Raises:
            OSError: it cannot be written; what was written before can be read.
        """
        self.closed = True
        self._info.end = end
        self._info.finished = datetime.now(timezone.utc).isoformat()
        try:
            if quickly:
                self.writer.close_parts(self._info)
            else:
                self.writer.finish(self._info)
        finally:
            counted = self.writer.counted(self._info)
            for fact in ("records", "captured", "thinned", "notes"):
                setattr(self._info, fact, getattr(counted, fact))
