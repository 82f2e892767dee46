"""``RunWriter``: writes a run as it goes, so that death at any moment costs at most the step in flight.

Rows go into a journal first (``journal.py``); full journals become Parquet parts in the background, and
``finish`` merges everything into one file (``merging.py``). Where it all stands is ``place.py``'s, how it is kept
within its limit ``shelf.py``'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gradtrace.errors import CaptureError
from gradtrace.trace.background import Background
from gradtrace.trace.journal import Journal
from gradtrace.trace.merging import encode, merge
from gradtrace.trace.parts import INFO_FILE, journal_file, part_of, remove_parts
from gradtrace.trace.place import Existing, claim
from gradtrace.trace.reserve import Reserve
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.shelf import Shelf, Thinned
from gradtrace.trace.trouble import gone

MAX_BYTES = 2_000_000_000
"""What a run may take on disk unless it is told otherwise."""

_JOURNAL_BYTES = 64 * 2**20
"""A journal of many small steps is closed at this size even if its rows are few, and at ..."""

_JOURNAL_SHARE = 1 / 64
_SMALL_JOURNAL = 64_000
"""... this share of what the run may take, but not below this size: a row in a journal is ten times as long."""

_WAITING_JOURNALS = 2
"""Closed journals that may wait for the encoder before ``write`` waits for it."""

_RESERVE = 1 / 4
"""With a limit so low that all these would take more than this share of it, none may wait."""

_UNTHINNED = 1 / 4
"""Nothing is thinned before this share of the limit has been written; a row takes less in a part than in a journal."""

_FEW_ROWS = 32


class RunWriter:
    """Writes one process's run.

    ``path`` is where the finished file will be, ``run_path`` what a user names to read the run (for several
    ranks the directory that holds the files of all), ``moved_to`` where an older run of that name went.
    ``bytes_written`` counts the bytes of the rows so far, and after ``finish`` is the size of the file. ``rows`` is the
    number of rows there are.

    **What the run takes on disk is bounded.** When it would exceed ``max_bytes``, older steps that were captured in
    full are thinned to what a watched step has: losses, learning rates, loss scales, outputs of outermost modules,
    events, everything non-finite, the state that the run started with, and the norm of the gradients. Each 2^k-th step
    stays in full, k being as small as suffices. The newest fifth of the bytes is never thinned, nor are the steps
    within ten of a protected one (``protect``) or of one that holds rows of operations or the event of an incident, as
    long as these take no more than three tenths: then those around the first incident stay, and around the latest.
    When a run is so long that this does not suffice, of all but each 2^j-th step losses and events alone stay. These
    are never dropped, so the limit has to have room for them, and for some tens of steps in full: a megabyte at least.

    The limit is that of the recording: ``finish`` writes all parts into one file before it removes them, and for this
    moment the disk holds the run twice. Where there is no room for that, the run stays readable in its parts.

    In a forked child every method does nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        info: RunInfo,
        *,
        existing: Existing = "refuse",
        rows_per_part: int = 262_144,
        max_bytes: int | None = MAX_BYTES,
        on_thinned: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Take the place at ``path``, which from then on reads as a run without rows.

        ``max_bytes`` limits what it takes on disk; None or 0 is no limit. ``on_thinned`` is told in one sentence, once,
        when steps have been thinned for that; it is called in the thread that writes.

        Raises:
            RunExistsError: an older run is there and ``existing`` is "refuse", or it is still being recorded.
            CaptureError: the place cannot be written.
        """
        with _unwritable(path):
            place = self._place = claim(Path(os.path.abspath(path)), info, existing)
        self.path, self.run_path, self.moved_to = place.path, place.run_path, place.moved_to
        self.bytes_written = 0
        self.in_one_file = False
        self._parts = place.parts
        self._pid = os.getpid()
        self._rows_per_part = rows_per_part
        self._max_bytes = max_bytes or None
        self._shelf = Shelf(self._parts, self._max_bytes, rows_per_part)
        self._know(info)
        self.on_thinned = on_thinned
        self._told: Thinned | None = None
        self._largest_step = 0
        self._rows = 0
        self._updates = 0
        self._last_seq = -1
        self._journal: Journal | None = None
        self._journals = 0
        self._writing = False
        self._closed = self._is_encoded = False
        self._background = Background("gradtrace-writer")
        self._reserve = Reserve(self._parts)
        with _unwritable(path):
            self._reserve_or_leave()

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
        self._demand_place()
        self._background.wait(self._may_wait + 1)
        self._tell_what_was_thinned()
        self._append(batch)
        if self._journal_is_full():
            self._hand_over()

    def update(self, info: RunInfo) -> None:
        """Replace what is known of the run."""
        if not self._in_child() and not self._closed:
            self._write_facts(info)

    def _know(self, info: RunInfo) -> None:
        self._info = info
        self._shelf.roots = {module.name for module in info.modules if module.root}

    def _reserve_or_leave(self) -> None:
        try:
            self._reserve.hold(0)
        except OSError:
            self._reserve.give_back()
            with suppress(OSError):
                remove_parts(self._parts)
            self._place.hold.release()
            raise

    def _write_facts(self, info: RunInfo) -> None:
        self._know(info)
        text = self._place.facts(self._promised(info))
        try:
            self._put_facts(text)
        except OSError as error:
            if info.end == "running":
                raise
            self._put_facts_at_last(text, error)
        if info.end == "running":
            self._reserve.hold(len(text))

    def _promised(self, info: RunInfo) -> RunInfo:
        """Return the facts that hold until the next ones: meanwhile the encoder may thin, and rows be fewer."""
        may_thin = not self._is_encoded and self.bytes_written > (self._max_bytes or math.inf) * _UNTHINNED
        counted = self.counted(info)
        return dataclasses.replace(counted, records=0) if may_thin else counted

    def _put_facts_at_last(self, text: str, error: OSError) -> None:
        """That the run ends is to be on the disk, if anything is: in the room held back, or in the old one's place."""
        if self._reserve.helps(error):
            self._put_facts(text)
        elif isinstance(error, PermissionError):  # to make files; to write to those that are there may be allowed
            (self._parts / INFO_FILE).write_text(text, encoding="utf-8")
        else:
            raise error

    def _put_facts(self, text: str) -> None:
        self._demand_place()
        self._updates += 1  # A signal handler's update may come in the middle of this one.
        temporary = self._parts / f"{INFO_FILE}.{self._updates}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._parts / INFO_FILE)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _demand_place(self) -> None:
        """See that the directory has not been removed, nor another one put in its place.

        Raises:
            OSError: it has been, or cannot be looked at.
        """
        if not self._place.hold.is_at(self._parts):
            self._parts.stat()  # which says so where it cannot be looked at
            raise gone(self._parts)

    @property
    def rows(self) -> int:
        """Number of rows that the run holds."""
        return self._rows - self._shelf.removed

    @property
    def is_in_place(self) -> bool:
        """Whether what was written is still where it was written to; taken for granted where that cannot be seen."""
        if self._place.hold.is_at(self._parts):
            return True
        try:
            self._parts.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return False

    def protect(self, step: int) -> None:
        """Never thin ``step``, nor those within ten of it."""
        if not self._in_child():
            self._shelf.protection.add(step)

    def finish(self, info: RunInfo) -> None:
        """Turn the run into one Parquet file; a second call does nothing.

        Raises:
            OSError: the file cannot be written; the run stays readable in its parts.
        """
        if self._in_child() or self._closed:
            return
        try:
            self._end_writing(info)
            self._write_facts(info)  # with what has been thinned at last: all that a merge needs is on disk
            merge(self._parts, self.path, self.counted(info))
            self.in_one_file = True
            self.bytes_written = self.path.stat().st_size
            self._reserve.give_back()  # on NFS a directory with an open file in it is not removed
            with suppress(OSError):
                remove_parts(self._parts)
        finally:
            self._closed = True
            self._background.abandon()  # a second Ctrl-C must not go on encoding while the interpreter ends
            self._reserve.give_back()
            self._place.hold.release()

    def _end_writing(self, info: RunInfo) -> None:
        try:
            self.update(info)
        finally:
            self._closed = True
            if self._journal is not None:
                self._journal.close()
            self._background.close()  # A part that failed has left its journal, which is merged as well.
            self._is_encoded = True
        self._tell_what_was_thinned()

    def close_parts(self, info: RunInfo) -> None:
        """End the run at once and leave it in its parts, from which it reads as well.

        May be called from a signal handler, even one that interrupts ``write``.
        """
        if self._in_child() or self._closed:
            return
        try:
            self.update(info)
        finally:
            self._closed = True
            if self._journal is not None and not self._writing:
                self._journal.close()
            self._background.abandon()
            self._reserve.give_back()
            self._place.hold.release()

    def _append(self, batch: pa.RecordBatch) -> None:
        journal = self._journal or self._next_journal()
        before = journal.bytes
        self._writing = True
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
        size = journal.bytes - before
        self._largest_step = max(self._largest_step, size)
        self.bytes_written += size

    def _next_journal(self) -> Journal:
        self._journals += 1  # first: a file that a signal handler's exception leaves behind is not to be in the way
        return Journal(journal_file(self._parts, self._journals - 1))

    def _journal_is_full(self) -> bool:
        journal = self._journal
        if journal is None:
            return False
        return journal.rows >= self._rows_per_part or journal.bytes >= self._most_in_journal

    @property
    def _most_in_journal(self) -> float:
        return min(_JOURNAL_BYTES, max((self._max_bytes or math.inf) * _JOURNAL_SHARE, _SMALL_JOURNAL))

    def _hand_over(self) -> None:
        """Close the journal and have it encoded in the background."""
        journal, self._journal = self._journal, None
        assert journal is not None
        journal.close()
        self._background.submit(partial(self._encode, self._journals - 1))

    def _encode(self, index: int) -> None:
        """In the background: turn a journal into a part, and see to it that the run fits."""
        self._demand_place()
        table = encode(self._parts, index)
        self._shelf.add(part_of(journal_file(self._parts, index)), index, table)
        self._shelf.fit(self._bytes_in_journals(self._may_wait))

    @property
    def _may_wait(self) -> int:
        fits = self._bytes_in_journals(_WAITING_JOURNALS) <= (self._max_bytes or math.inf) * _RESERVE
        return _WAITING_JOURNALS if fits else 0

    def _bytes_in_journals(self, waiting: int) -> float:
        """Return what journals may take: those that wait, the one being encoded and the one being written."""
        return (waiting + 2) * (self._most_in_journal + self._largest_step)

    def _tell_what_was_thinned(self) -> None:
        """Say it once, and let those who read the run know how far it has come."""
        done = self._shelf.thinned
        if done is None or done == self._told:
            return
        first_time, self._told = self._told is None, done
        self.update(self._info)
        if first_time:
            self.on_thinned(_in_words(done, self._max_bytes))

    def _check_order(self, batch: pa.RecordBatch) -> None:
        seq = batch["seq"]
        if len(seq) <= _FEW_ROWS:  # of a step that was only watched: asking Arrow takes longer than all else
            values: list[Any] = [self._last_seq, *seq.to_pylist()]
            descends = any(one >= other for one, other in itertools.pairwise(values))
        else:
            descends = pc.any(pc.greater_equal(seq[:-1], seq[1:])).as_py() or seq[0].as_py() <= self._last_seq
        if descends:
            raise ValueError("rows must come in the order of seq")

    def counted(self, info: RunInfo) -> RunInfo:
        """Return the facts with what the writer knows: how many rows there are, and which steps were thinned."""
        done = self._shelf.thinned
        if done is None:
            return dataclasses.replace(info, records=self.rows)
        return dataclasses.replace(
            info,
            records=self.rows,
            captured=max(info.captured - self._shelf.no_longer_full, 0),
            thinned={"first_step": done.first_step, "last_step": done.last_step, "every": done.plan.full},
            notes=[*info.notes, _in_words(done, self._max_bytes)],
        )

    def _in_child(self) -> bool:
        return os.getpid() != self._pid


def _in_words(done: Thinned, max_bytes: int | None) -> str:
    first, last, plan = done.first_step, done.last_step, done.plan
    limit = max_bytes or 0
    size = f"{limit / 1e9:g} GB" if limit >= 1e9 else f"{limit / 1e6:g} MB"
    words = f"to stay within {size}, steps {first} to {last} were thinned: "
    words += f"of these one in {plan.full} is kept in full, and those around incidents"
    rest = "of the others losses, learning rates, gradient norms, the model's outputs and what is not finite"
    if plan.watched > 1:
        rest = f"of the others one in {plan.watched} as a watched step, and all losses"
    return f"{words}; {rest}"


@contextmanager
def _unwritable(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CaptureError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error
