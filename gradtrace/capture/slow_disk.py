"""Thins steps before they are written where the disk is slower than the training (``pace.py`` says when).

A thinned step has what a watched one has, as ``trace/thinning.py`` has it for steps that are thinned later. In full
stays one in so many, whatever came non-finite where it had been finite, and the steps around an incident; these for a
limited number of steps, since an incident that never ends must not hold up the training for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from gradtrace.capture.measures import Measure
from gradtrace.capture.rows import Entry, Rows
from gradtrace.capture.sites import Site
from gradtrace.trace.pace import Kind, Pace
from gradtrace.trace.protection import Protection
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.thinning import TELLING_EVENTS, WATCHED

MOST_PROTECTED = 64
"""So many steps around incidents are written in full, however slow the disk is."""

_NORM = Site("backward", None, "grad_norm", "")

_Place = tuple[str, str | None, str, str]


class SlowDisk:
    """Decides step by step what of it is written, and counts the steps that were thinned.

    ``pace`` is told when a write begins; that it has ended ``written`` tells it.
    """

    def __init__(self, pace: Pace, roots: Collection[str]) -> None:
        """``roots`` are the names of outermost modules; it may grow."""
        self.pace = pace
        self._roots = roots
        self._protection = Protection()
        self._places: set[_Place] = set()
        self._step: int | None = None
        self._thins = False
        self._first = self._last = self._steps = self._told = 0

    def protect(self, step: int) -> None:
        """Something that matters was non-finite in ``step``: those after it are written in full."""
        self._protection.add(step)

    def fitting(self, step: int, rows: Rows, *, in_full: bool) -> tuple[Rows, Kind]:
        """Return of these rows of a step what is to be written, and what that is.

        Rows of one step may come in several parts; they are treated alike.
        """
        if not in_full:
            return rows, "watched"
        if step != self._step:
            self._step, self._thins = step, self._is_to_be_thinned(step, rows)
        if not self._thins:
            return rows, "full"
        return thinned(rows, self._roots), "thinned"

    def written(self, step: int, kind: Kind) -> bool:
        """The operating system has the rows; return whether ``step`` is one more that was thinned."""
        self.pace.ended(step, kind)
        if kind != "thinned" or (self._steps and step == self._last):
            return False
        self._first = self._first if self._steps else step
        self._last = step
        self._steps += 1
        return True

    def has_news(self) -> bool:
        """Whether the run's facts are to have the number of steps by now: each time they are twice as many."""
        if self._steps < max(2 * self._told, 1):
            return False
        self._told = self._steps
        return True

    def tell(self, info: RunInfo) -> None:
        """Put into the facts how many steps there are by now."""
        if self._steps:
            info.paced = {"first_step": self._first, "last_step": self._last, "steps": self._steps}

    def beginning(self) -> str:
        """Return what to say when the first step has been thinned."""
        return (
            f"the disk is slower than the training: from step {self._first} on most steps are recorded as if they were "
            "only watched; the last lines will say how many"
        )

    def note(self) -> str | None:
        """Return what to say in the end, if there is anything."""
        if not self._steps:
            return None
        many = f"step {self._first} was" if self._steps == 1 else f"{self._steps:,} of the steps {self._first} to "
        many += "" if self._steps == 1 else f"{self._last} were"
        return (
            f"the disk was slower than the training: {many} thinned as they came; of these there are losses, "
            "learning rates, gradient norms, the model's outputs and what is not finite"
        )

    def _is_to_be_thinned(self, step: int, rows: Rows) -> bool:
        if step % self.pace.every == 0:
            return False
        if any(map(_tells, rows.sites)):
            self.protect(step)
        places = {_place(entry[0]) for entry in rows.entries if entry[3].counts is not None}
        is_news = not places <= self._places
        self._places |= places
        return not (is_news or any(step in window for window in self._protection.ranges(MOST_PROTECTED)))


def thinned(rows: Rows, roots: Collection[str]) -> Rows:
    """Return what stays of a step: what ``trace/thinning.py`` keeps, and for each backward pass the gradients' norm."""
    stays = [_stays(entry, roots) for entry in rows.entries]
    kept = {seq: entry for seq, entry, is_kept in zip(rows.seqs, rows.entries, stays, strict=True) if is_kept}
    free = [seq for seq, is_kept in zip(rows.seqs, stays, strict=True) if not is_kept]
    if not any(site.tensor == "grad_norm" for site in rows.sites):
        for gradients in _passes(rows):
            seq = _place_of_norm([seq for seq, _ in gradients], kept, free)
            if seq is not None:
                kept[seq] = _norm_of([entry for _, entry in gradients])
    seqs = sorted(kept)
    return Rows([kept[seq] for seq in seqs], seqs)


def _stays(entry: Entry, roots: Collection[str]) -> bool:
    site, measure = entry[0], entry[3]
    if measure.counts is not None or site.phase == "event":
        return True
    if site.phase == "input" and site.tensor in ("param", "buffer"):
        return True
    if _is_operation(site):
        return False
    return site.tensor in WATCHED or (site.tensor == "output" and site.owner is not None and site.owner.name in roots)


def _passes(rows: Rows) -> Iterator[list[tuple[int, Entry]]]:
    """Yield the gradients of each backward pass; several may share a micro step, and each begins with a loss."""
    found: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
    losses = 0
    for seq, entry in zip(rows.seqs, rows.entries, strict=True):
        site = entry[0]
        if _is_operation(site):
            continue
        losses += site.tensor == "loss"
        if site.tensor == "grad" and site.phase == "backward":
            found.setdefault((entry[1], losses), []).append((seq, entry))
    yield from sorted(found.values(), key=lambda gradients: gradients[-1][0])


def _place_of_norm(gradients: list[int], kept: dict[int, Entry], free: list[int]) -> int | None:
    """Return the number of a row that goes, which the norm takes: that of the last gradient, else the nearest."""
    own = [seq for seq in gradients if seq not in kept]
    if own:
        return own[-1]
    last = gradients[-1]
    others = (seq for seq in free if seq not in kept)
    return min(others, key=lambda seq: (seq < last, abs(seq - last)), default=None)


def _norm_of(gradients: list[Entry]) -> Entry:
    measures = [entry[3] for entry in gradients]
    norm = math.hypot(*(measure.norm for measure in measures if measure.norm is not None))
    if any(measure.nan for measure in measures):
        norm = math.nan
    elif not all(measure.finite for measure in measures):
        norm = math.inf
    return _NORM, gradients[0][1], None, Measure.of_number(norm), None


def _tells(site: Site) -> bool:
    return _is_operation(site) or (site.phase == "event" and site.tensor in TELLING_EVENTS)


def _is_operation(site: Site) -> bool:
    return site.source is not None and site.source[0] is not None


def _place(site: Site) -> _Place:
    return site.phase, None if site.owner is None else site.owner.name, site.tensor, site.path
