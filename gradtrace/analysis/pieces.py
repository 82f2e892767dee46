"""The pieces of a run that is not one file yet (``trace/parts.py``): opened as far as they can be.

A piece that is damaged, or of another run, is left out; those before and after it are read all the same, and what is
missing between them is said.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import duckdb

from gradtrace.analysis.locate import demand_regular, settled
from gradtrace.analysis.soundness import (
    TOO_MANY_FILES,
    DamagedError,
    Extent,
    demand_columns,
    demand_values,
    demand_values_of_rows,
    demand_whole,
    extent_of,
    problem_of,
)
from gradtrace.errors import NotARunError
from gradtrace.trace.parts import chosen, numbers_of, part_of

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class _Piece:
    """A piece that is read; ``end`` is how its file ends."""

    path: Path
    first: int
    last: int
    extent: Extent
    end: Literal["whole", "cut off", "damaged"]


class Pieces:
    """The pieces of one directory, opened.

    ``parquet`` are paths that DuckDB and Arrow can open for as long as ``opened`` stays open; the rows of ``journals``
    follow theirs. ``rank`` is that of the rows, if there are any.
    """

    def __init__(self, directory: Path, connection: duckdb.DuckDBPyConnection, rank: int | None) -> None:
        """Open what is there. ``rank`` is that of the run, None where it is not known.

        Raises:
            FileNotFoundError: a piece went away before it could be opened, because a better one is there now.
        """
        self.parquet: list[str] = []
        self.journals: list[pa.Table] = []
        self.opened = ExitStack()
        self.rank = rank
        self._connection = connection
        self._read: list[_Piece] = []
        self._problems: dict[Path, str] = {}
        files = settled(directory.iterdir)
        self._highest = max((numbers[1] for file in files if (numbers := numbers_of(file))), default=-1)
        with ExitStack() as opened:
            opened.push(self.opened)
            chosen(files, self._open)
            opened.pop_all()

    def losses(self, end: str) -> Iterator[str]:
        """Yield in words what is missing of a run that ended so."""
        for before, after in pairwise([None, *self._read, None]):
            first = 0 if before is None else before.last + 1
            stop = self._highest + 1 if after is None else after.first
            is_last = after is None and first == stop
            # Cut off at the very end is the step in flight, which is said of a run that was killed.
            if before is not None and before.end != "whole" and not (is_last and _is_expected(before, end)):
                yield f"{before.path.name} is {before.end}: {_between(before, after)}"
            elif first < stop:
                yield f"{self._why(first, stop)}: {_between(before, after)}"

    def _why(self, first: int, stop: int) -> str:
        """Say what became of the pieces from number ``first`` up to, not including, ``stop``."""
        inside = {
            path.name: problem
            for path, problem in self._problems.items()
            if (numbers := numbers_of(path)) and first <= numbers[0] and numbers[1] < stop
        }
        if not inside:
            return f"piece {first} is gone" if stop == first + 1 else f"pieces {first} to {stop - 1} are gone"
        name, problem = next(iter(inside.items()))
        others = f" (and {len(inside) - 1} more like it)" if len(inside) > 1 else ""
        return f"{name}{others} is left out, it {problem}"

    def _open(self, path: Path) -> bool:
        try:
            self._read.append(self._open_journal(path) if path.suffix == ".arrow" else self._open_part(path))
        except FileNotFoundError:
            raise
        except (NotARunError, duckdb.Error, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise OSError(errno.EMFILE, TOO_MANY_FILES, str(path)) from None
            self._problems[path] = problem_of(error, path)
            return False
        return True

    def _open_journal(self, path: Path) -> _Piece:
        from gradtrace.trace.journal import read_contents

        try:
            demand_regular(path, may_be_empty=True)
            rows, end = read_contents(path)
        except FileNotFoundError:  # encoded meanwhile
            return self._open_part(part_of(path))
        extent = _extent_of_rows(rows)
        if end == "damaged" and not rows.num_rows:
            raise DamagedError(path, "is damaged")
        demand_values_of_rows(path, rows)
        self._take(path, extent)
        self.journals.append(rows)
        return _Piece(path, *_numbers(path), extent, end)

    def _open_part(self, path: Path) -> _Piece:
        # By descriptor: the data stays readable when the writer replaces and removes its parts.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with ExitStack() as opened:
            opened.callback(os.close, fd)
            demand_regular(path)
            demand_whole(path, fd)
            file = f"/dev/fd/{fd}"
            demand_columns(path, file, self._connection)
            demand_values({file: path}, self._connection)
            extent = extent_of(file, self._connection)
            self._take(path, extent)
            self.opened.push(opened.pop_all())
        self.parquet.append(file)
        return _Piece(path, *_numbers(path), extent, "whole")

    def _take(self, path: Path, extent: Extent) -> None:
        """Let a piece follow on those that are read.

        Raises:
            DamagedError: it is of another run.
        """
        if extent.ranks is None or extent.first_seq is None:
            return
        last = max((piece.extent.last_seq for piece in self._read if piece.extent.last_seq is not None), default=-1)
        rank = extent.ranks[0] if self.rank is None else self.rank
        if extent.ranks != (rank, rank) or extent.first_seq <= last:
            raise DamagedError(path, "is of another run")
        self.rank = rank


def _numbers(path: Path) -> tuple[int, int]:
    numbers = numbers_of(path)
    assert numbers is not None
    return numbers


def _extent_of_rows(rows: pa.Table) -> Extent:
    if not rows.num_rows:
        return Extent(None, None, None, None, None, 0)
    import pyarrow.compute

    compute: Any = pyarrow.compute  # its stubs take a column for a list
    ends = [compute.min_max(rows[column]).as_py() for column in ("step", "seq", "rank")]
    steps, seqs, ranks = ((found["min"], found["max"]) for found in ends)
    return Extent(*steps, *seqs, ranks, rows.num_rows)


def _is_expected(last: _Piece, end: str) -> bool:
    return last.end == "cut off" and end in ("killed", "running")


def _between(before: _Piece | None, after: _Piece | None) -> str:
    """Say what is missing between two pieces."""
    last = None if before is None else before.extent.last_step
    first = None if after is None else after.extent.first_step
    if last is None and first is None:
        return "what it had recorded is missing"
    if last is None:
        return f"what was recorded before step {first} is missing"
    since = f"what was recorded after step {last}, or in it, is missing"
    return (
        since if first is None else f"what was recorded between steps {last} and {first} is missing, or a part of them"
    )
