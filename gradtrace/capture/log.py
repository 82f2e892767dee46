"""Hands finished steps to the writer and keeps the run's own counts.

Rows whose numbers are still on an accelerator wait here until the next look at the device, and what comes
after them waits too: the file is in the order of ``seq``.
"""

from __future__ import annotations

import threading
from datetime import datetime, timezone

from gradtrace.capture.rows import Rows
from gradtrace.capture.session import Session, warn
from gradtrace.trace.incident import IncidentFinder
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter


class StepLog:
    """The written side of a recording."""

    def __init__(self, session: Session, writer: RunWriter, info: RunInfo) -> None:
        self.writer = writer
        writer.on_thinned = warn
        self.closed = False
        self.busy = False
        """Whether rows are being handed over: a signal handler must not hand over others then."""
        self._lock = threading.RLock()  # backward passes of several threads end here
        self._session = session
        self._info = info
        self._late: list[tuple[int, datetime, Rows]] = []
        self._times: tuple[int, datetime] | None = None
        self._root_names: set[str] = set()
        self._finder = IncidentFinder(self._root_names)
        self._current: int | None = None
        self._captured: int | None = None
        self._matters: list[Record] = []
        self._skipped = False
        self._modules_told = 0

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
            step, time, rows = self._late.pop(0)
            ready, waiting = rows.ready()
            if len(waiting):
                self._late.insert(0, (step, time, waiting))
            self._write_now(step, time, ready.to_be_written())
            if len(waiting):
                break

    def _write(self, step: int, rows: Rows) -> None:
        if not len(rows):
            return
        self._session.names.freeze()
        self._late.append((step, self._time_of(step), rows))
        self.write_late()

    def _time_of(self, step: int) -> datetime:
        """Return the time at which a step ended; what is added to it later has the same."""
        if self._times is None or self._times[0] != step:
            self._times = (step, datetime.now(timezone.utc))
        return self._times[1]

    def _write_now(self, step: int, time: datetime, rows: Rows) -> None:
        if not len(rows):
            return
        self.writer.write(self._session.rows.batch(rows, step, time))
        self._info.records += len(rows)
        if step != self._current:
            self._finish_step()
            self._current = step
            self._info.steps += 1
            self._info.last_step = step
        self._matters += rows.records_that_matter(step, self._info.rank)
        self._skipped = self._skipped or rows.has_event("skip")
        self._tell_modules()

    def _tell_modules(self) -> None:
        """Let a run that is being recorded, or was killed, know its modules."""
        count = self._session.names.count
        if count != self._modules_told:
            self._modules_told = count
            self._info.modules = self._session.names.module_table()
            self.writer.update(self._info)

    def _finish_step(self) -> None:
        if self._current is None:
            return
        self._root_names.update(root.name for root in self._session.names.roots)
        if self._finder.add_step(self._current, self._matters, skipped=self._skipped):
            # Ten skips in a row are an incident that began with the first of them.
            self.writer.protect(self._finder.incidents[-1].first_step)
            self.writer.protect(self._current)
        self._matters, self._skipped = [], False

    def complete_info(self) -> None:
        """Fill in what is known of the run when it ends."""
        self._finish_step()
        info, session = self._info, self._session
        info.incidents = len(self._finder.incidents)
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
        if quickly:
            self.writer.close_parts(self._info)
        else:
            self.writer.finish(self._info)
        counted = self.writer.counted(self._info)
        self._info.records, self._info.captured = counted.records, counted.captured
