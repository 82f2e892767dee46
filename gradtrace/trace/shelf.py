"""The closed parts of a run that is being recorded, kept within a number of bytes.

When they are too many, steps of the oldest parts are thinned (``thinning.py``), as little as suffices: every second
step first, and when all old parts are so, three of four, and on. A part is replaced in one go, at any moment
the directory holds it whole, old or new. All of this happens in the writer's background thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import pyarrow as pa

from gradtrace.trace.merging import read_part, write_part
from gradtrace.trace.parts import joined_part
from gradtrace.trace.protection import Protection
from gradtrace.trace.thinning import Plan, contents, thinned

NEWEST = 0.2
"""This share of the bytes belongs to the newest parts, which are never thinned: what led to an incident is there."""

PROTECTED = 0.3
"""Steps around incidents are kept in full up to this share of the bytes."""

_SHARE_OF_A_PART = 1 / 32
_SMALL_PART = 64_000
"""Parts are not joined beyond this share of the bytes, or this size: while one is written, the old ones still stand."""

_BYTES_WITHOUT_ROWS = 7_000
"""What a part takes beside its rows."""

_JOINED_AT_ONCE = 8
_MUCH_LARGER = 4
"""So many parts are joined, none of them much larger than the newest: each row is written anew a few times only."""


@dataclass
class _Part:
    """A closed part: the numbers of its pieces, what it holds, and the plan by which it was thinned.

    ``full`` are the steps captured in full, as ranges: a run may have millions, one after the other.
    """

    path: Path
    first: int
    last: int
    rows: int
    bytes: int
    first_step: int
    last_step: int
    full: tuple[range, ...]
    plan: Plan


@dataclass
class Thinned:
    """What has been thinned so far: the first and the last step, and which others stayed in full."""

    first_step: int
    last_step: int
    plan: Plan


class Shelf:
    """The closed parts of one directory.

    ``removed`` is the number of rows that are gone, ``no_longer_full`` that of the steps to which they belonged, and
    ``thinned`` is None until there are such. ``roots`` are the names of outermost modules.
    """

    def __init__(self, directory: Path, max_bytes: int | None, rows_per_part: int) -> None:
        self.protection = Protection()
        self.roots: Collection[str] = ()
        self.removed = self.no_longer_full = 0
        self.thinned: Thinned | None = None
        self._directory = directory
        self._max_bytes = max_bytes
        self._rows_per_part = rows_per_part
        self._parts: list[_Part] = []
        self._plan = Plan()
        self._bytes_per_step = 1.0

    def add(self, path: Path, index: int, table: pa.Table) -> None:
        """Take a part that has just been closed, the newest one; ``table`` has its rows."""
        if self._max_bytes is None or not table.num_rows:
            return
        there = contents(table)
        for step in there.telling:
            self.protection.add(step)
        size = path.stat().st_size
        if there.full:
            self._bytes_per_step = size / len(there.full)
        steps = there.first_step, there.last_step
        self._parts.append(_Part(path, index, index, table.num_rows, size, *steps, _in_ranges(there.full), Plan()))
        self._join_small(len(self._parts) - 1)

    def fit(self, reserve: float) -> None:
        """Thin old steps until there is room for ``reserve`` bytes that are written elsewhere.

        What cannot be thinned any further stays: the losses and events of all steps, the newest steps, and those around
        incidents. A reserve beyond half of the limit, of steps too large for it, is none to thin everything for.
        """
        if self._max_bytes is None:
            return
        most = max(self._max_bytes - self._most_in_a_part - reserve, self._max_bytes / 2)
        while sum(part.bytes for part in self._parts) > most:
            old = self._parts[: self._count_of_old()]
            waiting = next((n for n, part in enumerate(old) if part.plan != self._plan), None)
            if waiting is not None:
                self._thin(waiting)
            elif not self._plan_more(old):
                break

    @property
    def _most_in_a_part(self) -> float:
        assert self._max_bytes is not None
        return max(self._max_bytes * _SHARE_OF_A_PART, _SMALL_PART)

    def _count_of_old(self) -> int:
        """Return how many parts are not among the newest."""
        assert self._max_bytes is not None
        newest, count = 0, len(self._parts)
        while count and newest < NEWEST * self._max_bytes:
            count -= 1
            newest += self._parts[count].bytes
        return count

    def _plan_more(self, old: list[_Part]) -> bool:
        """Go on to the next stricter plan; return whether there is one."""
        if not old:
            return False
        steps = old[-1].last_step - old[0].first_step + 1
        full, watched = self._plan
        if full <= steps:
            self._plan = Plan(full * 2, watched)
        elif watched <= steps:
            self._plan = Plan(full, watched * 2)
        else:
            return False
        return True

    def _thin(self, number: int) -> None:
        part = self._parts[number]
        part.plan = self._plan
        is_kept = self._kept_steps(number)
        if self._plan.watched > 1 or any(step % self._plan.full and not is_kept(step) for step in _each(part.full)):
            before = read_part(part.path)
            after = thinned(before, self._plan, self.roots, is_kept)
            if after.num_rows < before.num_rows:
                self._replace(part, after)
        self._join_small(number)

    def _kept_steps(self, number: int) -> Callable[[int], bool]:
        """Return which steps of a part stay in full whatever the plan: they are protected, or not all in this part."""
        assert self._max_bytes is not None
        part = self._parts[number]
        around = self._parts[max(number - 1, 0) : number + 2]
        split = {one.last_step for one, other in pairwise(around) if one.last_step == other.first_step}
        windows = self.protection.ranges(int(PROTECTED * self._max_bytes / self._bytes_per_step))
        near = [window for window in windows if window.start <= part.last_step and part.first_step < window.stop]
        return lambda step: step in split or any(step in window for window in near)

    def _replace(self, part: _Part, table: pa.Table) -> None:
        """Put what has been left of its rows in a part's place, and note which steps are affected."""
        write_part(part.path, table)
        self.removed += part.rows - table.num_rows
        full = contents(table).full
        fewer = sorted(set(_each(part.full)).difference(full)) or [part.first_step, part.last_step]
        self.no_longer_full += sum(map(len, part.full)) - len(full)
        part.rows, part.bytes, part.full = table.num_rows, part.path.stat().st_size, _in_ranges(full)
        done = self.thinned or Thinned(fewer[0], fewer[-1], self._plan)
        first, last = min(done.first_step, fewer[0]), max(done.last_step, fewer[-1])
        self.thinned = Thinned(first, last, self._plan)

    def _join_small(self, number: int) -> None:
        """Join a part with those before it when there are many like it, so that small parts do not pile up."""
        newest = self._parts[number]
        rows, size, start = 0, _BYTES_WITHOUT_ROWS, number + 1
        for part in reversed(self._parts[: number + 1]):
            rows, size = rows + part.rows, size + part.bytes - _BYTES_WITHOUT_ROWS
            fits = rows <= self._rows_per_part and size <= self._most_in_a_part
            if not fits or part.plan != newest.plan or part.rows > _MUCH_LARGER * newest.rows:
                break
            start -= 1
        if number + 1 - start >= _JOINED_AT_ONCE:
            self._parts[start : number + 1] = [self._joined(self._parts[start : number + 1])]
            self._join_small(start)

    def _joined(self, parts: list[_Part]) -> _Part:
        first, last = parts[0], parts[-1]
        path = joined_part(self._directory, first.first, last.last)
        table = pa.concat_tables([read_part(part.path) for part in parts])
        write_part(path, table)
        for part in parts:
            part.path.unlink()  # They have counted for nothing since the joined part is there.
        full = _in_ranges(sorted({step for part in parts for step in _each(part.full)}))
        numbers = first.first, last.last
        steps = first.first_step, last.last_step
        return _Part(path, *numbers, table.num_rows, path.stat().st_size, *steps, full, first.plan)


def _in_ranges(steps: Iterable[int]) -> tuple[range, ...]:
    """Return ascending numbers as ranges."""
    ranges: list[range] = []
    for step in steps:
        last = ranges[-1] if ranges else range(0)
        if len(last) == 1 and step > last.start:
            ranges[-1] = range(last.start, step + 1, step - last.start)
        elif len(last) > 1 and step == last[-1] + last.step:
            ranges[-1] = range(last.start, step + 1, last.step)
        else:
            ranges.append(range(step, step + 1))
    return tuple(ranges)


def _each(ranges: Iterable[range]) -> Iterator[int]:
    return chain.from_iterable(ranges)
