"""Where two runs part ways, in execution order: what is known of them beside each other, then their boundaries.

``pairs.py`` aligns and measures the records, ``facts.py`` looks at the rest; here it is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from gradtrace.analysis.compare.facts import changes, modules_of
from gradtrace.analysis.compare.model import Difference, ModuleDifference
from gradtrace.analysis.compare.pairs import ROWS_AT_ONCE, Aligned, Place
from gradtrace.analysis.compare.parts import Overlap, Pair, Side, Unmatched
from gradtrace.analysis.compare.tally import Line, Shared, Tally, kinds
from gradtrace.analysis.compare.tolerance import default_tolerance, tolerances
from gradtrace.analysis.recording import Recording, reading
from gradtrace.analysis.tabular import counted
from gradtrace.errors import NoMatchError
from gradtrace.trace.schema import Record

_DECIDING = ("shape", "nan_count", "posinf_count", "neginf_count")
_SHOWN = 3

StepRange = tuple[int | None, int | None]
Ranks = list[tuple[int, int]]


def compare(
    a: Recording,
    b: Recording,
    *,
    rtol: float | None = None,
    steps: StepRange | None = None,
    rank: int | None = None,
    modules: Sequence[str] = (),
    most: int | None = 20,
    progress: Callable[[float], None] = lambda share: None,
) -> Difference:
    """Return where two runs part ways.

    ``rtol`` is the relative difference that counts, by default one for each dtype (``tolerance.py``). ``steps``
    limits the comparison to steps from the first up to, not including, the second, ``rank`` to one process,
    ``modules`` to those whose names match one of the glob patterns. ``most`` is the largest number of modules that are
    listed, None for all. ``progress`` is told the share that is done, from 0 to 1.

    Raises:
        NoMatchError: the runs have no such rank or module, or no step or boundary in common.
    """
    ranks = _ranks(a, b, rank)
    names = _matching(a, b, modules)
    tally = Tally()
    with reading(a, b), Aligned(a, b) as aligned:
        scale = tolerances(_kinds(aligned, "a", ranks), _kinds(aligned, "b", ranks), rtol)
        for number, pair in enumerate(ranks):
            aligned.take_ranks(*pair)
            first, end = steps or (None, None)
            shared = tally.meet(aligned.steps("a", first, end), aligned.steps("b", first, end))
            ended = {_broken_off(run, of) for run, of in zip((a, b), pair, strict=True)}
            aligned.share((step.step, step.full and step.step not in ended) for step in shared)
            if names is None:
                tally.scalars += aligned.scalar_changes(default_tolerance("float64") if rtol is None else rtol)
            for begin, last, done in _stretches(shared):
                tally.add(aligned.groups(begin, last, scale, names))
                progress((number + done) / len(ranks))
        _demand_something_in_common(a, b, tally, steps)
        return _put_together(a, b, tally, aligned, scale, ranks, most)


def _ranks(a: Recording, b: Recording, rank: int | None) -> Ranks:
    """Return which ranks to compare: those of the same number; of two single processes, these."""
    there_a, there_b = ([info.rank for info in run.infos] for run in (a, b))
    shared = [number for number in there_a if number in there_b]
    if rank is not None:
        if rank not in shared:
            raise NoMatchError(f"rank {rank} is not in both runs; A has {_list(there_a)}, B has {_list(there_b)}")
        return [(rank, rank)]
    if shared:
        return [(number, number) for number in shared]
    if len(there_a) == len(there_b) == 1:
        return [(there_a[0], there_b[0])]
    raise NoMatchError(f"no rank in common: A has {_list(there_a)}, B has {_list(there_b)}")


def _matching(a: Recording, b: Recording, patterns: Sequence[str]) -> list[str] | None:
    """Return the modules of either run that match one of the patterns, None without patterns."""
    if not patterns:
        return None
    there = [*dict.fromkeys((*modules_of(a.infos), *modules_of(b.infos)))]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in there):
            raise NoMatchError(f"no module matches {pattern!r}; names look like: {_some(there[::-1])}")
    return [name for name in there if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _kinds(aligned: Aligned, name: str, ranks: Ranks) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for pair in ranks:
        aligned.take_ranks(*pair)
        found |= aligned.kinds(name)
    return found


def _broken_off(run: Recording, rank: int) -> int | None:
    """Return the step in which a run broke off and of which it may have the beginning alone."""
    info = next(info for info in run.infos if info.rank == rank)
    return None if info.end == "completed" else info.last_step


def _stretches(shared: Sequence[Shared]) -> Iterator[tuple[int, int, float]]:
    """Yield stretches of steps, as the first and last, of so many records together, and the share done with each."""
    first, records = 0, 0
    for number, step in enumerate(shared):
        records += step.records
        if records >= 2 * ROWS_AT_ONCE or number == len(shared) - 1:
            yield shared[first].step, step.step, (number + 1) / len(shared)
            first, records = number + 1, 0


def _demand_something_in_common(a: Recording, b: Recording, tally: Tally, steps: StepRange | None) -> None:
    for run, there in ((a, tally.steps_a), (b, tally.steps_b)):
        if not there:
            raise NoMatchError(f"{run.path} has no records to compare{' in these steps' if steps else ''}")
    if not tally.shared:
        raise NoMatchError(
            f"no step in common: A has {_span(tally.steps_a)}, B has {_span(tally.steps_b)}; "
            "a run that was resumed counts on with record --first-step"
        )
    if not tally.compared:
        names_a, names_b = ([name for name in modules_of(run.infos) if name] for run in (a, b))
        raise NoMatchError(
            f"no boundary in common in {counted(len(tally.shared), 'step')}; modules of A: {_some(names_a)}; of B: "
            f"{_some(names_b)}: are they runs of the same model, recorded with the same options?"
        )


def _put_together(
    a: Recording,
    b: Recording,
    tally: Tally,
    aligned: Aligned,
    scale: dict[str, float],
    ranks: Ranks,
    most: int | None,
) -> Difference:
    differing = tally.differing
    chosen = differing[:most]
    first = tally.first
    places = [place for _, line in chosen for place in (line.first, line.worst) if place]
    records = aligned.records([*places, *([first] if first else [])])
    pairs = {place: _pair(place, *found) for place, found in records.items()}
    types = {name: module.type for infos in (b.infos, a.infos) for name, module in modules_of(infos).items()}
    return Difference(
        a=_side(a),
        b=_side(b),
        overlap=_overlap(a, b, tally, ranks),
        tolerances=scale,
        changes=changes(a.infos, b.infos),
        scalars=tuple(tally.scalars),
        dtypes=tuple(kinds(tally.dtypes)),
        devices=tuple(kinds(tally.devices)),
        compared=tally.compared,
        differing=sum(line.differing for line in tally.lines.values()),
        only_a=_in_order(tally.only_a, a),
        only_b=_in_order(tally.only_b, b),
        first=pairs[first] if first else None,
        first_type=types.get(pairs[first].a.module or "") if first and pairs[first].a.module is not None else None,
        modules=tuple(_module(module, types, line, pairs) for module, line in chosen),
        modules_compared=sum(module is not None and line.compared > 0 for module, line in tally.lines.items()),
        modules_differing=sum(module is not None for module, _ in differing),
    )


def _side(run: Recording) -> Side:
    records = sum(info.records for info in run.infos)
    return Side(run.path, tuple(run.info.command), run.steps, records, len(run.infos), run.end, tuple(run.missing))


def _overlap(a: Recording, b: Recording, tally: Tally, ranks: Ranks) -> Overlap:
    there_a, there_b = ({info.rank for info in run.infos} for run in (a, b))
    return Overlap(
        steps=len(tally.shared),
        first=min(tally.shared),
        last=max(tally.shared),
        full=len(tally.shared - tally.partial),
        only_a=len(tally.steps_a - tally.steps_b),
        only_b=len(tally.steps_b - tally.steps_a),
        ranks=tuple(rank for rank, _ in ranks),
        ranks_only_a=tuple(sorted(there_a - {rank for rank, _ in ranks})),
        ranks_only_b=tuple(sorted(there_b - {rank for _, rank in ranks})),
    )


def _module(module: str | None, types: dict[str, str], line: Line, pairs: dict[Place, Pair]) -> ModuleDifference:
    assert line.first is not None and line.worst is not None
    kind = None if module is None else types.get(module)
    return ModuleDifference(module, kind, line.compared, line.differing, pairs[line.first], pairs[line.worst])


def _in_order(only: dict[str | None, Unmatched], run: Recording) -> tuple[Unmatched, ...]:
    """Return what one run has alone, the earliest first, then in the order of the model."""
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(modules_of(run.infos))}
    return tuple(sorted(only.values(), key=lambda one: (one.first_step, numbers.get(one.module, -1), one.module or "")))


def _pair(place: Place, a: Record, b: Record) -> Pair:
    return Pair(a, b, statistic(a, b), place.difference, place.tolerance)


def statistic(a: Record, b: Record) -> str:
    """Return the column that decides: shape or a count where these differ, else min, max or norm."""
    for name in _DECIDING:
        if (getattr(a, name) or 0) != (getattr(b, name) or 0):
            return name
    magnitude = max((abs(value) for row in (a, b) for value in (row.min, row.max) if value is not None), default=0.0)
    scales = {"min": magnitude, "max": magnitude, "norm": max(a.norm or 0.0, b.norm or 0.0)}

    def apart(name: str) -> float:
        one, other = getattr(a, name), getattr(b, name)
        if one is None or other is None:
            return float(one is not other)
        return abs(one - other) / scales[name] if scales[name] else 0.0

    # A scalar's norm has lost its sign.
    return max(("max", "norm", "min") if a.numel == b.numel == 1 else ("norm", "max", "min"), key=apart)


def _span(steps: Iterable[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}"


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) or "none"
