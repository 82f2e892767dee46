"""The last words of ``record``: what was written, what was not seen, what to run next. Pure."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtrace.printable import shell_word
from gradtrace.trace.runinfo import STOPPED

if TYPE_CHECKING:
    from gradtrace.capture.tracer import Tracer
    from gradtrace.trace.runinfo import RunInfo

    from .record_plan import RecordPlan


@dataclass(frozen=True)
class Line:
    """One line for stderr; warnings are shown with ``--quiet``, too."""

    text: str
    warning: bool = False


def moved_aside(tracer: Tracer, plan: RecordPlan) -> Iterator[Line]:
    """Yield the line that says where an older run went, if there was one."""
    if tracer.moved_to is not None and tracer.info.rank == 0:
        moved_to = os.path.join(os.path.dirname(plan.path), tracer.moved_to.name)
        yield Line(f"moved the older {plan.path} to {moved_to}")


def first_nan(plan: RecordPlan) -> str:
    """Return the command that asks the run for its first non-finite value."""
    return f"gradtrace first-nan {shell_word(plan.path)}"


def last_words(tracer: Tracer, plan: RecordPlan) -> Iterator[Line]:
    """Yield the lines that end a recording; ranks above 0 have only warnings to say."""
    info = tracer.info
    warnings = list(_warnings(info, plan))
    prefix = f"rank {info.rank}: " if info.rank else ""
    for text in warnings:
        yield Line(prefix + text, warning=True)
    if info.rank:
        return
    for text in _notes(info, plan):
        yield Line(f"note: {text}")
    if not tracer.is_in_place:  # nothing is left of it, as has been said
        return
    rank = f" (rank {info.rank} of {info.world_size})" if info.world_size > 1 else ""
    made = f"wrote {plan.path}{rank}" if tracer.in_one_file else f"kept {plan.path}{rank} in its parts"
    yield Line(f"{made}: {_facts(info, plan)}, {_size(tracer.bytes_written)}")
    if info.records:
        yield Line(_next(info, plan))


def _warnings(info: RunInfo, plan: RecordPlan) -> Iterator[str]:
    unmatched = list(_unmatched(info, plan))
    yield from unmatched
    if unmatched:
        return
    if info.end.startswith(STOPPED):  # it stopped too early to know
        return
    if not (info.records or info.unmeasured or any(module.calls for module in info.modules)):
        yield (f"no module was called, so nothing was recorded. Does {plan.script} run the model in a subprocess?")
    elif plan.settings.steps is not None and not info.captured:
        first, end = ("" if bound is None else str(bound) for bound in plan.settings.steps)
        yield f"no step was captured in full: none of the run lies in steps {first}:{end}"


def _unmatched(info: RunInfo, plan: RecordPlan) -> Iterator[str]:
    names = [module.name for module in info.modules if module.name]
    for option, patterns in (("--include", plan.settings.include), ("--exclude", plan.settings.exclude)):
        for pattern in patterns:
            if info.modules and _no_match(pattern) in info.notes:
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
                like = f"; names look like: {', '.join(near)}" if near else ""
                yield f"{option} '{pattern}' matches no module{like}"


def _no_match(pattern: str) -> str:
    """Return the note that the tracer makes of a pattern that matched nothing."""
    return f"pattern {pattern!r} matched no module"


def _notes(info: RunInfo, plan: RecordPlan) -> Iterator[str]:
    if info.unmeasured:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in info.unmeasured.items())
        total = _count(sum(info.unmeasured.values()), "boundary", "boundaries")
        yield f"{total} could not be measured or never fired: {reasons}"
    said_already = [_no_match(pattern) for pattern in (*plan.settings.include, *plan.settings.exclude)]
    yield from (note for note in info.notes if note not in said_already)


def _facts(info: RunInfo, plan: RecordPlan) -> str:
    # A module without code of its own (ModuleList) is never called, and none is missed.
    seen = sum(module.file is not None or module.calls > 0 for module in info.modules)
    observed = sum(module.calls > 0 for module in info.modules)
    captured = f" ({info.captured:,} captured in full)" if plan.leaves_out else ""
    return (
        f"{_count(info.steps, 'step', 'steps')}{captured}, {observed:,} of {_count(seen, 'module', 'modules')}, "
        f"{_count(info.records, 'record', 'records')}"
    )


def _next(info: RunInfo, plan: RecordPlan) -> str:
    if not info.incidents:
        return f"no incident; see: gradtrace summary {shell_word(plan.path)}"
    return f"{_count(info.incidents, 'incident', 'incidents')}; see: {first_nan(plan)}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(number: int) -> str:
    size, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
