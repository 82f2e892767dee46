"""The first non-finite boundary of a run, and what made it: evidence in (SQL), a ``Verdict`` out.

Here the parts are put together: which incident (``incidents.py``), what the rules say of the step in which it
began (``classify.py``), back to earlier steps where the value had arrived from there, and how far it got.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from gradtrace.analysis.births import Explanation
from gradtrace.analysis.candidates import candidates_for
from gradtrace.analysis.classify import Background, find_cause
from gradtrace.analysis.confirmation import explain
from gradtrace.analysis.evidence import Evidence
from gradtrace.analysis.hints import hints_for
from gradtrace.analysis.incidents import RunIncident, choose, read_timeline
from gradtrace.analysis.recording import answers
from gradtrace.analysis.scene import Scene, is_bad
from gradtrace.analysis.verdict_model import (
    Cause,
    Fate,
    Finding,
    IncidentSummary,
    RunFacts,
    Verdict,
)
from gradtrace.errors import NoMatchError
from gradtrace.trace.incident import Incident, looks_like_mask
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

_HISTORY_STEPS = 5
_MOST_CONTAINED = 20
_MAY_COME_FROM_ELSEWHERE = frozenset({Cause.GRADIENT, Cause.CHANGED_GRADIENT, Cause.UPDATE, Cause.MOVED_IN})
"""What a rank shows that only received, through an all-reduce, what another rank made."""


@answers
def first_nan(
    run: Recording,
    *,
    incident: int | None = None,
    steps: tuple[int | None, int | None] | None = None,
    rank: int | None = None,
    context: int = 5,
    skipped: bool = False,
) -> Verdict:
    """Name the first non-finite boundary of an incident and what made it.

    ``incident`` counts from 1; by default the incident that never ended is taken, else the first. ``steps``
    limits the search to steps from the first up to, not including, the second; ``rank`` to one process. A
    value that had been made before those steps is still followed back to where it was made. ``context`` is
    the number of records shown that came before. With ``skipped`` the incidents are the steps that GradScaler skipped,
    which as such do not matter: what made their gradients overflow is named.

    Raises:
        NoMatchError: the run has no such incident, step or rank.
    """
    return _Inquiry(run, steps or (None, None), rank, skipped).verdict(incident, context)


@dataclass(frozen=True)
class _Origin:
    """One rank's answer."""

    rank: int
    incident: Incident
    finding: Finding
    when: tuple[int, int, int] = (0, 0, 0)
    """Where several ranks have one: when in its own order the rank met the value; the same program can be compared."""


class _Inquiry:
    """One question to one run."""

    def __init__(self, run: Recording, bounds: tuple[int | None, int | None], rank: int | None, of_skips: bool) -> None:
        self._run = run
        self._of_skips = of_skips
        self._evidence = Evidence(run)
        self._modules: dict[str, ModuleInfo] = {}
        for info in run.infos:
            for module in info.modules:
                self._modules.setdefault(module.name, module)
        self._roots = frozenset(name for name, module in self._modules.items() if module.root)
        self._timeline = read_timeline(
            self._evidence,
            self._roots,
            lambda of, step: rank in (None, of) and _inside(step, bounds),
            of_skips=of_skips,
        )
        self._check(bounds, rank)
        self._tolerated: dict[tuple[int, int], list[tuple[Record, int]]] = {}

    def _check(self, bounds: tuple[int | None, int | None], rank: int | None) -> None:
        by_rank = self._timeline.steps
        if rank is not None and by_rank and rank not in by_rank:
            have = ", ".join(map(str, sorted(by_rank)))
            raise NoMatchError(f"{self._run.path} has no rank {rank}; it has: {have}")
        if bounds == (None, None):
            return
        recorded = sorted({step for of_rank in by_rank.values() for step in of_rank})
        if recorded and not any(_inside(step, bounds) for step in recorded):
            first, end = ("" if bound is None else bound for bound in bounds)
            raise NoMatchError(f"no recorded step lies in {first}:{end}; the run has {recorded[0]} to {recorded[-1]}")

    def verdict(self, number: int | None, context: int) -> Verdict:
        chosen = choose(self._timeline.incidents, number)
        origins = [] if chosen is None else self._origins(chosen)
        summaries = self._summaries(chosen)
        if chosen is None or not origins:
            if self._of_skips:
                return Verdict(self._facts(), of_skips=True)
            return Verdict(self._facts(), contained=self._harmless(), fates=self._harmless_fates())
        origin = origins[0]
        finding, row = origin.finding, origin.finding.row
        before = self._evidence.context(finding.seen, context) if context else []
        if finding.seen.seq < row.seq:
            before.append(finding.seen)
        module = self._modules.get(row.module) if row.module is not None else None
        healthy = self._bad_in_healthy_steps(row.rank, row.step)
        explanation = self._explanation(origin)
        return Verdict(
            run=self._facts(),
            finding=finding,
            module_type=module.type if module else None,
            source=(module.file, module.line) if module and module.file and module.line else None,
            incident=next(summary for summary in summaries if summary.chosen),
            reached=_reached(origin.incident, chosen),
            since=self._timeline.since(origin.rank, origin.incident),
            received_by=tuple(sorted(set(chosen.by_rank) - {other.rank for other in origins})),
            handled=self._was_handled(origin),
            context=tuple(before),
            history=tuple(self._history(row)),
            affected=self._evidence.spread(origin.rank, origin.incident.first_step),
            contained=(*finding.dismissed, *(like for like, _ in healthy))[:_MOST_CONTAINED],
            fates={**{like.seq: _harmless_fate(like, n) for like, n in healthy}, **finding.fates},
            candidates=candidates_for(
                finding,
                [(other.finding, other.when > origin.when) for other in origins[1:]],
                self._run.infos,
                self._gap(row),
                watched=self._evidence.is_watched(row.rank, row.step),
            ),
            incidents=tuple(summaries),
            hints=hints_for(finding, module.type if module else None, explanation.birth),
            explanation=explanation,
            of_skips=self._of_skips,
            loss_scales=self._loss_scales(origin),
        )

    def _origins(self, chosen: RunIncident) -> list[_Origin]:
        """Return the answers of the ranks that may have made it, in the order in which the ranks came to it.

        Those that only received it are left out.
        """
        origins = []
        for rank, incident in chosen.by_rank.items():
            start = self._start(rank, incident) if incident.first_step == chosen.first_step else None
            if start is not None:
                origins.append(_Origin(rank, incident, self._explain(start)))
        made = [o for o in origins if o.finding.cause not in _MAY_COME_FROM_ELSEWHERE]
        if len(made) < 2:
            return made or origins[:1]
        return sorted((replace(o, when=self._when(o.finding.seen)) for o in made), key=lambda o: o.when)

    def _when(self, seen: Record) -> tuple[int, int, int]:
        """Return step, pass and place in the step of a record."""
        return seen.step, seen.micro_step, seen.seq - self._evidence.first_of_step(seen)

    def _start(self, rank: int, incident: Incident) -> Record | None:
        """Return the first record that mattered in the incident."""
        if incident.reached[:1] == ["skips"]:
            return self._evidence.first_overflow(rank, incident.first_step)
        skipped = (rank, incident.first_step) in self._timeline.skipped
        finder_saw = self._timeline.matters[rank, incident.first_step]
        return next(
            row
            for row in finder_saw
            if row.tensor in incident.reached
            and row.phase != "input"
            and not (skipped and (row.tensor == "grad" or (row.tensor == "loss" and not row.nan_count)))
        )

    def _explain(self, last: Record) -> Finding:
        """Return what made ``last`` non-finite, followed back through earlier steps."""
        scene = Scene(self._evidence.scene(last), self._roots, self._modules.keys(), until=last.seq)
        if not scene.bad:
            return Finding(Cause.LOSS_SCALE, last, last)
        state = self._evidence.bad_state_before(scene.rows[0])
        starts = [row for row in scene.bad if row.phase == "input" and row.tensor in ("param", "buffer")]
        background = Background(self._tolerance(last), (*state, *starts))
        finding = find_cause(scene, background)
        source = self._source(finding)
        if source is None:
            return finding
        if source.phase == "input":
            return replace(finding, row=source, fates={**finding.fates, source.seq: Fate.MADE})
        earlier = self._explain(source)
        return replace(earlier, fates={**finding.fates, finding.seen.seq: Fate.PASSED_ON, **earlier.fates})

    def _source(self, finding: Finding) -> Record | None:
        """Return the earlier record that a step's first bad value came from, None if it was made there."""
        if finding.cause is Cause.INITIAL:
            return self._evidence.start_of(finding.row)
        if finding.cause in (Cause.BATCH, Cause.BETWEEN) and finding.seen.tensor == "input":
            return self._evidence.same_tensor_before(finding.seen)
        return None

    def _explanation(self, origin: _Origin) -> Explanation:
        """Return what the replay says; skipped steps are an incident, and replayed, only when there are ten."""
        row, incident = origin.finding.row, origin.incident
        last = incident.last_step if incident.reached[:1] == ["skips"] else row.step
        return explain(origin.finding, self._evidence.replay(row.rank, row.step, last), incident.first_step)

    def _loss_scales(self, origin: _Origin) -> tuple[tuple[int, float | None], ...]:
        """Return the loss scale of each step of an incident of skips."""
        incident = origin.incident
        if incident.reached[:1] != ["skips"]:
            return ()
        return tuple(self._evidence.loss_scales(origin.rank, incident.first_step, incident.last_step))

    def _tolerance(self, last: Record) -> _Tolerance:
        return _Tolerance(row for row, _ in self._bad_in_healthy_steps(last.rank, last.step))

    def _bad_in_healthy_steps(self, rank: int, step: int) -> list[tuple[Record, int]]:
        if (rank, step) not in self._tolerated:
            unhealthy = [bad for bad in self._timeline.unhealthy(rank) if bad < step]
            self._tolerated[rank, step] = self._evidence.bad_in_healthy_steps(rank, step, unhealthy)
        return self._tolerated[rank, step]

    def _harmless(self) -> tuple[Record, ...]:
        """Return what was non-finite in a run with nothing wrong, a record for each boundary."""
        return tuple(row for row, _ in self._all_harmless())[:_MOST_CONTAINED]

    def _harmless_fates(self) -> dict[int, Fate]:
        return {row.seq: _harmless_fate(row, steps) for row, steps in self._all_harmless()}

    def _all_harmless(self) -> list[tuple[Record, int]]:
        ends = {rank: steps[-1] + 1 for rank, steps in self._timeline.steps.items()}
        return [pair for rank, end in ends.items() for pair in self._bad_in_healthy_steps(rank, end)]

    def _was_handled(self, origin: _Origin) -> bool:
        """Whether the script, or GradScaler, dropped the failing pass and went on to a finite one."""
        incident = origin.incident
        if {"param", "buffer"} & set(incident.reached):
            return False
        if (origin.rank, incident.first_step) in self._timeline.skipped:
            return incident.ended
        row = origin.finding.row
        if row.phase not in ("input", "forward") or {"loss", "grad"} & set(incident.reached):
            return False
        rest = self._evidence.rest_of_step(row, self._roots)
        after = next((later for later in rest if later.phase == "input" or later.tensor == "loss"), None)
        if after is None:
            return incident.ended
        outputs = [later for later in rest if later.tensor == "output"]
        return after.phase == "input" and not any(map(is_bad, outputs[-1:]))

    def _history(self, row: Record) -> list[Record]:
        """Return the same boundary in the steps just before, or in those before that were captured in full."""
        found = self._evidence.history(row, self._timeline.previous_steps(row.rank, row.step, _HISTORY_STEPS))
        if len(found) == _HISTORY_STEPS or not self._evidence.watched_steps:
            return found
        before = reversed(self._timeline.previous_steps(row.rank, row.step, row.step))
        full = list(islice((step for step in before if not self._evidence.is_watched(row.rank, step)), _HISTORY_STEPS))
        earlier = self._evidence.history(row, full)
        return sorted({one.seq: one for one in [*found, *earlier]}.values(), key=lambda one: one.seq)[-_HISTORY_STEPS:]

    def _gap(self, row: Record) -> tuple[int, int] | None:
        """Return the steps just before ``row``'s that were not recorded, first and last."""
        earlier = self._timeline.previous_steps(row.rank, row.step, 1)
        start = self._run.info.config.get("first_step")
        first = earlier[0] + 1 if earlier else start if isinstance(start, int) else 0
        return (first, row.step - 1) if first < row.step else None

    def _summaries(self, chosen: RunIncident | None) -> list[IncidentSummary]:
        return [
            IncidentSummary(
                number,
                incident.first_step,
                incident.last_step,
                incident.ended,
                tuple(incident.reached),
                tuple(sorted(incident.by_rank)),
                incident is chosen,
            )
            for number, incident in enumerate(self._timeline.incidents, 1)
        ]

    def _facts(self) -> RunFacts:
        run = self._run
        return RunFacts(
            run.path,
            run.steps,
            run.end,
            tuple(run.missing),
            modules=len(self._modules),
            records=sum(info.records for info in run.infos),
            last_step=max((steps[-1] for steps in self._timeline.steps.values()), default=None),
            damaged=bool(run.damage),
        )


def _reached(first: Incident, all_ranks: RunIncident) -> tuple[str, ...]:
    """Return what was reached, in the order of the rank that made the value; the others only received it."""
    whats = dict.fromkeys([*first.reached, *all_ranks.reached])
    return tuple(what for what in whats if what in ("loss", "grad", "buffer", "param"))


class _Tolerance:
    """Whether a record's like was non-finite in healthy steps: same boundary, and no new kind of value."""

    def __init__(self, healthy: Iterable[Record]) -> None:
        self._kinds: dict[tuple[str | None, str, str], set[str]] = {}
        for row in healthy:
            self._kinds.setdefault(_place(row), set()).update(_kinds(row))

    def __call__(self, row: Record) -> bool:
        return _kinds(row) <= self._kinds.get(_place(row), set())


def _place(row: Record) -> tuple[str | None, str, str]:
    return row.module, row.tensor, row.path


def _kinds(row: Record) -> set[str]:
    return {name for name in ("nan_count", "posinf_count", "neginf_count") if getattr(row, name)}


def _harmless_fate(row: Record, steps: int) -> Fate:
    return Fate.TOLERATED if steps > 1 or looks_like_mask(row) else Fate.CONTAINED


def _inside(step: int, bounds: tuple[int | None, int | None]) -> bool:
    first, end = bounds
    return (first is None or step >= first) and (end is None or step < end)
