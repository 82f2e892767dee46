"""What a verdict says in words, in the order in which people ask: what, where, how bad, what led to it. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gradtrace.analysis import replay_text
from gradtrace.analysis.labels import module_label
from gradtrace.analysis.replay_text import short_kind
from gradtrace.analysis.tabular import counted, text_table
from gradtrace.analysis.verdict_model import Cause, Fate, Finding, Verdict
from gradtrace.printable import printable
from gradtrace.trace.runinfo import STOPPED

if TYPE_CHECKING:
    from gradtrace.analysis.verdict_model import IncidentSummary
    from gradtrace.trace.schema import Record

_LABEL = 11
_REPLAYABLE = ("forward", "loss", "backward")
"""What an operation of torch can have made; of anything else there is nothing to replay."""


@dataclass(frozen=True)
class Table:
    """A table to be drawn."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def notes(verdict: Verdict) -> Iterator[str]:
    """Yield what is to be said of the recording itself, for stderr."""
    run = verdict.run
    # Of these ``missing`` speaks.
    if run.end not in ("completed", "killed", "running", "unknown") and not run.end.startswith(STOPPED):
        yield f"the run ended with {run.end}; the last recorded step is {_or_none(run.last_step)}"
    yield from run.missing


def text(verdict: Verdict) -> str:
    """Return all of it as one text, the notes last."""
    # Only tables have lines of their own.
    lines = [
        text_table(block.columns, block.rows) if isinstance(block, Table) else printable(block)
        for block in report(verdict)
    ]
    return "\n".join([*lines, *(printable(f"note: {note}") for note in notes(verdict))])


def report(verdict: Verdict) -> Iterator[str | Table]:
    """Yield the lines and tables of the verdict."""
    if verdict.finding is None:
        yield from _nothing_wrong(verdict)
        return
    yield from _answer(verdict, verdict.finding)
    yield from _what_led_to_it(verdict, verdict.finding)
    yield from _earlier_steps(verdict)
    yield from _other_readings(verdict)
    yield from _incidents(verdict)
    yield ""
    yield from (f"Usual mend: {hint}" for hint in verdict.hints)


def _nothing_wrong(verdict: Verdict) -> Iterator[str]:
    run = verdict.run
    if not run.records:
        yield "The run holds no records, so nothing can be said of it."
        return
    if verdict.of_skips:
        yield f"GradScaler skipped none of {counted(run.steps, 'step')}."
        return
    yield (
        f"No NaN or Inf that matters in {counted(run.steps, 'step')} of {counted(run.modules, 'module')} "
        f"({counted(run.records, 'record')})."
    )
    if run.damaged:
        yield "A part of the recording is damaged or gone: what that held is not known."
    for fate, words in (
        (Fate.TOLERATED, "Tolerated (again and again, or a mask, without harm)"),
        (Fate.CONTAINED, "Contained (once, and gone before it reached loss, gradients or weights)"),
    ):
        rows = [row for row in verdict.contained if verdict.fates.get(row.seq) is fate]
        if rows:
            yield f"{words}: {_some([f'{_place(row)} ({short_kind(row)})' for row in rows])}."


def _answer(verdict: Verdict, finding: Finding) -> Iterator[str]:
    row = finding.row
    where = _module(row.module, verdict.module_type)
    rank = f", rank {row.rank}" if row.rank or verdict.received_by else ""
    call = f" of call {row.call}" if row.call else ""
    first = "What GradScaler skipped for" if verdict.of_skips else "First non-finite value"
    yield (
        f"{first}: step {row.step}{rank}, {finding.cause.phase}, {where}, "
        f"{row.tensor} {row.path}{call}: {_values(row)}".replace(" :", ":")
    )
    yield from _what_made_it(verdict, finding)
    if finding.seen.seq != row.seq and finding.cause is not Cause.LEARNING_RATE:
        label = "first used" if finding.cause is Cause.INITIAL else "first seen"
        yield _line(label, f"step {finding.seen.step}, {_place(finding.seen)}: {_values(finding.seen)}")
    known = verdict.explanation is not None and verdict.explanation.birth is not None
    if not known and verdict.source and "/torch/nn/" not in verdict.source[0].replace(os.sep, "/"):
        yield _line("source", f"{verdict.source[0]}:{verdict.source[1]} (class {verdict.module_type})")
    if row.dtype:
        finite = "" if row.min is None else f"; its finite elements {row.min:.4g} to {row.max:.4g}"
        yield _line("tensor", f"{row.dtype} {row.shape}{finite}")
    if finding.all_tolerated:
        yield _line("but", "healthy steps held the like of it too; nothing else on the way was non-finite")
    yield from _how_far(verdict)


def _what_made_it(verdict: Verdict, finding: Finding) -> Iterator[str]:
    """Name the operation and its line, where they are known, then the module and the reason to name it."""
    explanation = verdict.explanation
    birth = explanation.birth if explanation else None
    lines = [*replay_text.operation(birth)] if birth else []
    lines.append(("within" if birth else "made by", _made_by(finding)))
    if explanation and finding.cause.phase in _REPLAYABLE:
        lines += replay_text.replay(explanation)
    yield from (_line(label, text) for label, text in lines)


def _made_by(finding: Finding) -> str:
    row, maker = finding.row, finding.maker
    own = "code outside any module" if maker is None else f"the code of {_module(maker)} itself"
    words = {
        Cause.BATCH: "nothing in the model: the batch arrived with it",
        Cause.INITIAL: "nothing in the training: the run started with it",
        Cause.MOVED_IN: "no optimizer: it had no gradient in this step, something else wrote it",
        Cause.MODULE: f"{_module(maker)}: its inputs were finite, and its parameters when last seen",
        Cause.BETWEEN: f"{own}, between its calls of other modules" if maker is not None else own,
        Cause.BUFFER: f"{_module(row.module)}, which updates it in its forward",
        Cause.LOSS: "the code that computes the loss: all that the modules returned was finite",
        Cause.BACKWARD: f"the backward of {_module(maker)}: the gradient that came in was finite",
        Cause.BACKWARD_BETWEEN: f"the backward of {own}"
        if maker is not None
        else "the backward of the code between the model and the loss",
        Cause.GRADIENT: f"the gradient of {_module(row.module)}'s own parameter: what came in was finite",
        Cause.CHANGED_GRADIENT: "code between backward and the optimizer step: it arrived finite",
        Cause.UPDATE: "the optimizer's update: its gradient was finite",
        Cause.LEARNING_RATE: f"the learning rate: {short_kind(finding.seen)} in group {finding.seen.path}",
        Cause.LOSS_SCALE: "GradScaler, which lowered the scale again and again",
    }
    return words[finding.cause]


def _how_far(verdict: Verdict) -> Iterator[str]:
    assert verdict.incident is not None
    spread, since, first = verdict.affected, verdict.since, verdict.incident.first_step
    if verdict.finding is not None and first != verdict.finding.row.step:
        yield _line("mattered", f"from step {first} on")
    parts = []
    for what in verdict.reached:
        step = since.get(what, first)
        when = f"at step {step}" if step == first else f"from step {step}"
        counts = {"grad": (spread.grads, spread.all_grads), "param": (spread.params, spread.all_params)}
        bad, total = counts.get(what, (0, 0))
        name = {"grad": "gradients", "param": "parameters", "buffer": "buffers"}.get(what, what)
        parts.append(f"{bad} of {total} {name} {when}" if bad and step == first else f"{name} {when}")
    if verdict.loss_scales:
        yield _line("loss scale", _scales(verdict.loss_scales))
    if verdict.of_skips:
        return  # nothing else was reached, and that they ended is what a scaler is for
    yield _line("reached", ", ".join(parts) or "neither loss, gradients nor weights")
    if verdict.received_by:
        yield _line("received", f"by rank {', '.join(map(str, verdict.received_by))}")
    if verdict.handled:
        yield _line("handled", "the optimizer did not step on it")
    if verdict.incident.ended:
        last = verdict.incident.last_step
        yield _line("ended", f"step {last} is the last one it touched; later steps are finite")


def _scales(scales: Sequence[tuple[int, float | None]], most: int = 4) -> str:
    """Return the loss scales in words: the first ones, and the last with its step."""
    texts = ["not finite" if scale is None else f"{scale:g}" for _, scale in scales]
    (first, _), (last, _) = scales[0], scales[-1]
    shown = texts if len(texts) <= most else [*texts[: most - 1], "...", texts[-1]]
    return f"{', '.join(shown)} at step{f's {first} to {last}' if last != first else f' {first}'}"


def _what_led_to_it(verdict: Verdict, finding: Finding) -> Iterator[str | Table]:
    yield ""
    yield "What led to it, oldest first"
    columns = ("", "step", "phase", "module", "tensor", "min", "max", "norm", "nan", "inf", "fate")
    yield Table(columns, [_table_row(row, verdict, row.seq == finding.row.seq) for row in verdict.trail])


def _table_row(row: Record, verdict: Verdict, marked: bool) -> tuple[Any, ...]:
    fate = verdict.fates.get(row.seq)
    return (
        ">" if marked else "",
        row.step,
        row.phase,
        _module(row.module),
        f"{row.tensor} {row.path}".strip(),
        *_statistics(row),
        fate.value if fate else "",
    )


def _earlier_steps(verdict: Verdict) -> Iterator[str | Table]:
    if verdict.history:
        yield ""
        yield "The same boundary in earlier steps"
        columns = ("step", "min", "max", "norm", "nan", "inf")
        yield Table(columns, [(row.step, *_statistics(row)) for row in verdict.history])


def _other_readings(verdict: Verdict) -> Iterator[str]:
    if verdict.candidates:
        yield ""
        yield "The records do not exclude"
    for other in verdict.candidates:
        step = "" if other.step is None else f"step {other.step}, "
        yield f"  {step}{other.phase}, {_module(other.module)}, {other.tensor}: {other.why}"
        yield f"    to know: {other.next}"


def _incidents(verdict: Verdict) -> Iterator[str]:
    if len(verdict.incidents) > 1:
        yield ""
        what = "Steps that GradScaler skipped" if verdict.of_skips else "Incidents of this run"
        yield f"{what} (choose with --incident N)"
        yield from (_incident(incident) for incident in verdict.incidents)


def _incident(incident: IncidentSummary) -> str:
    one = incident.first_step == incident.last_step
    steps = f"step {incident.first_step}" if one else f"steps {incident.first_step} to {incident.last_step}"
    end = "healed" if incident.ended else "never ended"
    mark = ">" if incident.chosen else " "
    reached = "; reached " + ", ".join(incident.reached) if incident.reached != ("skips",) else ""
    return f"{mark} {incident.number}  {steps}, {end}{reached}"


def _line(label: str, text: str) -> str:
    return f"  {label.ljust(_LABEL)}{text}"


def _module(name: str | None, kind: str | None = None) -> str:
    words = module_label(name)
    if not kind:
        return words
    return f"{words} {kind}" if name == "" else f"{words} ({kind})"


def _place(row: Record) -> str:
    path = f" {row.path}" if row.path else ""
    if row.module is None:
        return f"{row.tensor}{path}"
    return f"{_module(row.module)} {row.tensor}{path}"


def _values(row: Record) -> str:
    kinds = [(row.nan_count, "nan"), (row.posinf_count, "inf"), (row.neginf_count, "-inf")]
    counts = " and ".join(f"{count:,} {name}" for count, name in kinds if count)
    return f"{counts} of {row.numel:,}" if (row.numel or 0) > 1 else counts.removeprefix("1 ")


def _statistics(row: Record) -> tuple[Decimal | float | None, ...]:
    """Return min, max and norm to four digits, and the counts of NaN and Inf."""
    infinite = (row.posinf_count or 0) + (row.neginf_count or 0)
    numbers = (_rounded(value) for value in (row.min, row.max, row.norm))
    return (*numbers, row.nan_count or 0, infinite)


def _rounded(value: float | None) -> Decimal | float | None:
    """Return a number of four digits that still counts as one: a table aligns it to the right."""
    return Decimal(f"{value:.4g}") if value is not None and math.isfinite(value) else value


def _some(words: Sequence[str], most: int = 3) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _or_none(step: int | None) -> str:
    return "none" if step is None else str(step)
