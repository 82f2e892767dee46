"""The files of a whole run, of one rank or of several: which of them are read, and what is missing.

Which files a path means is found in ``locate.py``, and each is opened by ``source.py``. Nothing here changes a file,
but that a merge that was interrupted is finished.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, groupby
from typing import TypeVar

import duckdb

from gradtrace.analysis.locate import locate
from gradtrace.analysis.soundness import problem_of
from gradtrace.analysis.source import Opener, Source
from gradtrace.errors import NotARunError
from gradtrace.trace.runinfo import NewerRunError

_ATTEMPTS = 20
_PAUSE = 0.05
"""A file may go away between two looks, because the writer has just put a better one in its place."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sources:
    """The ranks of a run, by rank; in words what is known to be missing, and what of that is damage to its files."""

    ranks: list[Source]
    missing: list[str]
    damage: list[str]


def find_sources(path: str, open_files: ExitStack, connection: duckdb.DuckDBPyConnection) -> Sources:
    """Return the ranks of the run at ``path``. Of several files those that cannot be read are left out.

    ``connection`` is one that may read files.

    Raises:
        RunNotFoundError: there is nothing at ``path``.
        NotARunError: what is there is no run that this gradtrace can read.
    """
    try:
        sources, damage = _patiently(
            lambda is_last: _open_all(path, Opener(open_files, connection, without_facts=is_last))
        )
    except FileNotFoundError as error:
        raise NotARunError(f"{path} is no whole run: {error.filename} is missing") from None
    except OSError as error:
        raise NotARunError(f"{path} cannot be read: {error.strerror}") from None
    if len({source.info.run_id for source in sources if source.is_known}) > 1:
        names = ", ".join(sorted(source.path.name for source in sources))
        raise NotARunError(f"{path} holds several runs; name one of them: {names}")
    kept, missing = _latest_attempt(sources)
    _demand_each_once(path, kept)
    return Sources(kept, [*damage, *missing, *_missing_ranks(kept)], damage)


def _patiently(look: Callable[[bool], _T]) -> _T:
    """Look again while something goes away; ``look`` is told whether it is the last time."""
    for _ in range(_ATTEMPTS):
        try:
            return look(False)
        except FileNotFoundError:
            time.sleep(_PAUSE)
    return look(True)


def _open_all(text: str, opener: Opener) -> tuple[list[Source], list[str]]:
    """Return what could be opened, and in words what could not."""
    paths = locate(text)
    if len(paths) == 1:
        return [opener.open(paths[0])], []
    sources: list[Source] = []
    problems: list[str] = []
    for path in paths:
        try:
            sources.append(opener.open(path))
        except (FileNotFoundError, NewerRunError):
            raise
        except (NotARunError, OSError) as error:
            problems.append(f"{path.name} is left out, it {problem_of(error, path)}")
    if not sources:
        raise NotARunError(f"{text} has no run that can be read: {problems[0]}")
    return sources, problems


def _latest_attempt(sources: list[Source]) -> tuple[list[Source], list[str]]:
    """Choose the last attempt that recorded anything: one that died as it began has nothing to say."""
    last = max(source.info.attempt for source in sources)
    chosen = max((source.info.attempt for source in sources if not source.is_empty), default=last)
    kept = [source for source in sources if source.info.attempt == chosen]
    older = sorted(source.path.name for source in sources if source.info.attempt < chosen)
    notes = [f"earlier attempts are left out: {', '.join(older)}"] if older else []
    if chosen < last:
        notes.append(f"attempts after {chosen} recorded nothing and are left out; the last one was attempt {last}")
    return sorted(kept, key=lambda source: source.info.rank), notes


def _demand_each_once(path: str, sources: list[Source]) -> None:
    for rank, times in Counter(source.info.rank for source in sources).items():
        if times > 1:
            names = ", ".join(source.path.name for source in sources if source.info.rank == rank)
            raise NotARunError(
                f"{path} has rank {rank} more than once: {names}; name the files to read, or one of them"
            )


def _missing_ranks(sources: list[Source]) -> Iterator[str]:
    there = {source.info.rank for source in sources}
    world_size = max(source.info.world_size for source in sources)
    absent = [rank for rank in range(world_size) if rank not in there]
    numbers = count()
    for _, together in groupby(absent, key=lambda rank: rank - next(numbers)):
        first, *rest = together
        if rest:
            yield f"ranks {first} to {rest[-1]} of {world_size} have no file"
        else:
            yield f"rank {first} of {world_size} has no file"
