"""Hands finished steps to the writer and keeps the run's own counts.

Rows whose numbers are still on an accelerator wait here until the next look at the device; the rest of their
step does not wait for them.
"""

from __future__ import annotations

from datetime import datetime, timezone

from gradtrace.capture.rows import Row, records_that_matter
from gradtrace.capture.session import Session
from gradtrace.trace.incident import IncidentFinder
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter


class StepLog:
    """The written side of a recording."""

    def __init__(self, session: Session, writer: RunWriter, info: RunInfo) -> None:
        self.writer = writer
        self.closed = False
        self._session = session
        self._info = info
        self._late: list[tuple[int, datetime, list[Row]]] = []
        self._root_names: set[str] = set()
        self._finder = IncidentFinder(self._root_names)
        self._current: int | None = None
        self._matters: list[Record] = []
        self._skipped = False
        self._modules_told = 0

    def end_step(self, step: int) -> None:
        """Write the rows in flight as rows of ``step``."""
        self._write(step, self._session.rows.take())

    def extend_step(self, step: int, shift: int) -> None:
        """Write the rows in flight as more rows of ``step``, their micro steps moved up by ``shift``."""
        rows = self._session.rows.take()
        self._write(step, [row._replace(micro_step=row.micro_step + shift) for row in rows])

    def write_late(self) -> None:
        """Write the rows that waited for their numbers."""
        late, self._late = self._late, []
        for step, time, rows in late:
            self._write_now(step, time, rows)

    def _write(self, step: int, rows: list[Row]) -> None:
        if not rows:
            return
        self._session.names.freeze()
        time = datetime.now(timezone.utc)
        ready = [row for row in rows if row.measure is None or not row.measure.pending]
        waiting = [row for row in rows if row.measure is not None and row.measure.pending]
        if not any(row.measure is not None and row.measure.pending for _, _, late in self._late for row in late):
            self.write_late()
        if ready:
            self._write_now(step, time, ready)
        if waiting:
            self._late.append((step, time, waiting))

    def _write_now(self, step: int, time: datetime, rows: list[Row]) -> None:
        self.writer.write(self._session.rows.batch(rows, step, time))
        self._info.records += len(rows)
        if step != self._current:
            self._finish_step()
            self._current = step
            self._info.steps += 1
            self._info.last_step = step
        self._matters += records_that_matter(rows, step, self._info.rank)
        self._skipped = self._skipped or any(r.phase == "event" and r.tensor == "skip" for r in rows)
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
        self._finder.add_step(self._current, self._matters, skipped=self._skipped)
        self._matters, self._skipped = [], False

    def close(self, end: str, *, quickly: bool) -> None:
        """Finish the file."""
        self.closed = True
        self._finish_step()
        info, session = self._info, self._session
        session.names.freeze()
        info.incidents = len(self._finder.incidents)
        info.modules = session.names.module_table()
        info.unmeasured = dict(session.unmeasured)
        info.notes += [f"pattern {pattern!r} matched no module" for pattern in session.names.unmatched_patterns()]
        info.end = end
        info.finished = datetime.now(timezone.utc).isoformat()
        if quickly:
            self.writer.close_parts(info)
        else:
            self.writer.finish(info)
