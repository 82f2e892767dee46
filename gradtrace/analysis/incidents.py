"""The incidents of a recorded run: each rank's by the rules of ``trace/incident.py``, then put together."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from gradtrace.analysis.evidence import Evidence
from gradtrace.errors import NoMatchError
from gradtrace.trace.incident import Incident, IncidentFinder
from gradtrace.trace.schema import Record


@dataclass
class RunIncident:
    """Incidents of several ranks that overlap in time; ``by_rank`` holds each rank's first."""

    first_step: int
    last_step: int
    ended: bool
    by_rank: dict[int, Incident] = field(default_factory=dict)

    @property
    def reached(self) -> list[str]:
        """What went non-finite, in the order of the steps in which it did."""
        ordered = sorted(self.by_rank.values(), key=lambda incident: incident.first_step)
        return list(dict.fromkeys(what for incident in ordered for what in incident.reached))


@dataclass
class Timeline:
    """All steps of a run, which of them were skipped, which are part of an incident, and what mattered.

    Each rank's steps are sorted.
    """

    steps: dict[int, list[int]]
    skipped: set[tuple[int, int]]
    matters: dict[tuple[int, int], list[Record]]
    incidents: list[RunIncident]
    by_rank: dict[int, list[Incident]]

    def unhealthy(self, rank: int) -> list[int]:
        """Return the rank's steps that were skipped or lie in an incident."""
        inside = {step for incident in self.by_rank.get(rank, []) for step in self._steps_of(rank, incident)}
        return sorted(inside | {step for of, step in self.skipped if of == rank})

    def since(self, rank: int, incident: Incident) -> dict[str, int]:
        """Return the step in which the incident first reached each thing that it reached."""
        first: dict[str, int] = {}
        for step in self._steps_of(rank, incident):
            for row in self.matters.get((rank, step), []):
                if row.tensor in incident.reached and row.phase != "input":
                    first.setdefault(row.tensor, step)
        return first

    def previous_steps(self, rank: int, step: int, count: int) -> list[int]:
        """Return the last ``count`` recorded steps before ``step``."""
        steps = self.steps[rank]
        end = bisect_left(steps, step)
        return steps[max(end - count, 0) : end]

    def _steps_of(self, rank: int, incident: Incident) -> list[int]:
        steps = self.steps[rank]
        return steps[bisect_left(steps, incident.first_step) : bisect_right(steps, incident.last_step)]


def read_timeline(
    evidence: Evidence,
    roots: frozenset[str],
    counts: Callable[[int, int], bool] = lambda rank, step: True,
    *,
    of_skips: bool = False,
) -> Timeline:
    """Find the incidents of a run among the steps of which ``counts(rank, step)`` is true.

    With ``of_skips`` steps that GradScaler skipped are the incidents, and nothing else is.
    """
    steps = evidence.steps()
    skipped = evidence.skipped_steps()
    matters: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for row in evidence.that_matter(roots):
        matters[row.rank, row.step].append(row)
    for rows in matters.values():
        rows.sort(key=lambda row: row.seq)
    by_rank: dict[int, list[Incident]] = {}
    for rank, of_rank in steps.items():
        if of_skips:
            by_rank[rank] = _skips([step for step in of_rank if counts(rank, step)], rank, skipped)
            continue
        finder = IncidentFinder(roots)
        telling = {step for of, step in [*matters, *skipped] if of == rank}
        for step, before in zip(of_rank, [None, *of_rank], strict=False):
            if step not in telling and before not in telling:
                continue  # finite, as was the step before: there is nothing that it could begin or end
            rows = matters.get((rank, step), [])
            if counts(rank, step):
                finder.add_step(step, rows, skipped=(rank, step) in skipped)
            else:
                finder.add_step(step, [row for row in rows if row.phase == "input"])
        by_rank[rank] = finder.incidents
    return Timeline(steps, skipped, matters, _together(by_rank), by_rank)


def _skips(steps: list[int], rank: int, skipped: set[tuple[int, int]]) -> list[Incident]:
    """Return one incident for each row of skipped steps; it never ended where no later step was taken."""
    found: list[Incident] = []
    for is_skipped, group in groupby(steps, key=lambda step: (rank, step) in skipped):
        if is_skipped:
            together = list(group)
            found.append(Incident(together[0], together[-1], ["skips"], ended=together[-1] != steps[-1]))
    return found


def _together(by_rank: dict[int, list[Incident]]) -> list[RunIncident]:
    """Join incidents of different ranks whose steps overlap."""
    all_of_them = [(incident, rank) for rank, incidents in by_rank.items() for incident in incidents]
    joined: list[RunIncident] = []
    for incident, rank in sorted(all_of_them, key=lambda pair: (pair[0].first_step, pair[1])):
        last = joined[-1] if joined else None
        end = -math.inf if last is None else last.last_step if last.ended else math.inf
        if last is None or incident.first_step > end or (rank in last.by_rank and last.ended):
            last = RunIncident(incident.first_step, incident.last_step, incident.ended)
            joined.append(last)
        last.last_step = max(last.last_step, incident.last_step)
        last.ended = last.ended and incident.ended
        last.by_rank.setdefault(rank, incident)
    return joined


def choose(incidents: list[RunIncident], number: int | None) -> RunIncident | None:
    """Return incident ``number``, counted from 1; by default the one that never ended, else the first.

    Raises:
        NoMatchError: there is no incident of that number.
    """
    if number is None:
        fatal = [incident for incident in incidents if not incident.ended]
        return next(iter([*fatal, *incidents]), None)
    if not 1 <= number <= len(incidents):
        have = f"the incidents are 1 to {len(incidents)}" if incidents else "the run has no incident"
        raise NoMatchError(f"there is no incident {number}: {have}")
    return incidents[number - 1]
