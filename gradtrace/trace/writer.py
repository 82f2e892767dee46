"""``RunWriter``: writes a run as it goes, so that death at any moment costs at most the step in flight.

Rows go into a journal first (``journal.py``); full journals become Parquet parts in the background, and
``finish`` merges everything into one file (``merging.py``). Where it all stands is ``place.py``'s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gradtrace.errors import CaptureError
from gradtrace.trace.journal import Journal
from gradtrace.trace.merging import encode, merge
from gradtrace.trace.parts import INFO_FILE, journal_file
from gradtrace.trace.place import Existing, claim
from gradtrace.trace.process import this_process
from gradtrace.trace.runinfo import RunInfo

_JOURNAL_BYTES = 64 * 2**20
"""A journal of many small steps is closed at this size even if its rows are few."""

_WAITING_JOURNALS = 2
"""Closed journals that may wait for the encoder before ``write`` waits for it."""


class RunWriter:
    """Writes one process's run.

    ``path`` is where the finished file will be, ``run_path`` what a user names to read the run (for several
    ranks the directory that holds the files of all), ``moved_to`` where an older run of that name went.
    ``bytes_written`` counts the bytes of the rows so far, and after ``finish`` is the size of the file.

    In a forked child every method does nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        info: RunInfo,
        *,
        existing: Existing = "refuse",
        rows_per_part: int = 262_144,
    ) -> None:
        """Take the place at ``path``, which from then on reads as a run without rows.

        Raises:
            RunExistsError: an older run is there and ``existing`` is "refuse", or it is still being recorded.
            CaptureError: the place cannot be written.
        """
        with _unwritable(path):
            place = claim(Path(os.path.abspath(path)), info, existing)
        self.path, self.run_path, self.moved_to = place.path, place.run_path, place.moved_to
        self.bytes_written = 0
        self._parts = place.parts
        self._process = this_process()
        self._pid = os.getpid()
        self._rows_per_part = rows_per_part
        self._rows = 0
        self._updates = 0
        self._last_seq = -1
        self._journal: Journal | None = None
        self._journals = 0
        self._writing = False
        self._closed = False
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="gradtrace-writer")
        self._encoding: deque[Future[None]] = deque()
        with _unwritable(path):
            self.update(info)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the rows of one step, in the order of ``seq``; on return the operating system has them.

        Raises:
            ValueError: rows out of order, or the run is closed.
            OSError: the rows, or earlier ones in their second form, cannot be written. What was written
                before is safe.
        """
        if self._in_child() or not batch.num_rows:
            return
        if self._closed:
            raise ValueError("write to a run that is closed")
        self._check_order(batch)
        self._wait_for_encoder(_WAITING_JOURNALS)
        self._append(batch)
        if self._journal_is_full():
            self._hand_over()

    def update(self, info: RunInfo) -> None:
        """Replace what is known of the run."""
        if self._in_child() or self._closed:
            return
        values = json.loads(self._counted(info).to_json()) | {"process": self._process}
        self._updates += 1  # A signal handler's update may come in the middle of this one.
        temporary = self._parts / f"{INFO_FILE}.{self._updates}.tmp"
        temporary.write_text(json.dumps(values, allow_nan=False))
        temporary.replace(self._parts / INFO_FILE)

    def finish(self, info: RunInfo) -> None:
        """Turn the run into one Parquet file; a second call does nothing.

        Raises:
            OSError: the file cannot be written; the run stays readable in its parts.
        """
        if self._in_child() or self._closed:
            return
        self.update(info)
        self._closed = True
        if self._journal is not None:
            self._journal.close()
        self._encoder.shutdown()  # A part that failed has left its journal, which is merged as well.
        merge(self._parts, self.path, self._counted(info))
        self.bytes_written = self.path.stat().st_size
        shutil.rmtree(self._parts, ignore_errors=True)

    def close_parts(self, info: RunInfo) -> None:
        """End the run at once and leave it in its parts, from which it reads as well.

        May be called from a signal handler, even one that interrupts ``write``.
        """
        if self._in_child() or self._closed:
            return
        self.update(info)
        self._closed = True
        if self._journal is not None and not self._writing:
            self._journal.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _append(self, batch: pa.RecordBatch) -> None:
        self._writing = True
        journal = self._journal or self._next_journal()
        before = journal.bytes
        self._journal = None  # Where this fails, or is interrupted, nothing may follow in the same journal.
        try:
            journal.append(batch)
        except BaseException:
            journal.close()
            raise
        finally:
            self._writing = False
        self._journal = journal
        self._rows += batch.num_rows
        self._last_seq = batch["seq"][-1].as_py()
        self.bytes_written += journal.bytes - before

    def _next_journal(self) -> Journal:
        journal = Journal(journal_file(self._parts, self._journals))
        self._journals += 1
        return journal

    def _journal_is_full(self) -> bool:
        journal = self._journal
        if journal is None:
            return False
        return journal.rows >= self._rows_per_part or journal.bytes >= _JOURNAL_BYTES

    def _hand_over(self) -> None:
        """Close the journal and have it encoded in the background."""
        journal, self._journal = self._journal, None
        assert journal is not None
        journal.close()
        with suppress(RuntimeError):  # An interpreter that exits starts no thread; ``finish`` merges journals too.
            self._encoding.append(self._encoder.submit(encode, self._parts, self._journals - 1))

    def _wait_for_encoder(self, allowed: int) -> None:
        """Raise what went wrong in the background, and wait while more than ``allowed`` journals wait."""
        while self._encoding and (self._encoding[0].done() or len(self._encoding) > allowed + 1):
            self._encoding.popleft().result()

    def _check_order(self, batch: pa.RecordBatch) -> None:
        seq = batch["seq"]
        descends = pc.any(pc.greater_equal(seq[:-1], seq[1:])).as_py()
        if descends or seq[0].as_py() <= self._last_seq:
            raise ValueError("rows must come in the order of seq")

    def _counted(self, info: RunInfo) -> RunInfo:
        return dataclasses.replace(info, records=self._rows)

    def _in_child(self) -> bool:
        return os.getpid() != self._pid


@contextmanager
def _unwritable(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CaptureError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error
