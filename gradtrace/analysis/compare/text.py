"""Where two runs part ways, in words: what differs between the runs, the first boundary, the modules. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from gradtrace.analysis.compare.model import Difference, ModuleDifference
from gradtrace.analysis.compare.parts import Change, Kinds, Pair, Side, Unmatched
from gradtrace.analysis.labels import module_label
from gradtrace.analysis.tabular import counted, text_table
from gradtrace.analysis.verdict_text import Table
from gradtrace.printable import html_text, printable
from gradtrace.trace.schema import Record

_LABEL = 12
_NAMES = 3
_MODULE_CHANGES = {
    "module_type": "other type",
    "module_parameters": "other shape",
    "module_renamed": "renamed",
    "module_removed": "only in A",
    "module_added": "only in B",
}
_WORDS = {"nan_count": "nan", "posinf_count": "inf", "neginf_count": "-inf"}
_FINITE = ("min", "max", "norm")
_DIGITS = 6  # leaves 65504, the largest number of float16, as it is
_MOST_DIGITS = 17


def notes(difference: Difference) -> Iterator[str]:
    """Yield what is to be said of the two recordings themselves, for stderr."""
    for name, side in (("A", difference.a), ("B", difference.b)):
        yield from (f"{name}: {note}" for note in side.missing)


def text(difference: Difference) -> str:
    """Return all of it as one text, the notes last."""
    lines = [
        text_table(block.columns, block.rows) if isinstance(block, Table) else printable(block)
        for block in report(difference)
    ]
    return "\n".join([*lines, *(printable(f"note: {note}") for note in notes(difference))])


def html(difference: Difference) -> str:
    """Return the text for a notebook."""
    return f'<pre style="overflow-x:auto">{html_text(text(difference))}</pre>'


def report(difference: Difference) -> Iterator[str | Table]:
    """Yield lines and tables in the order in which people ask: what was changed, where it shows, how far it goes."""
    yield _runs(difference)
    yield ""
    yield from _changes(difference)
    yield from _coverage(difference)
    yield ""
    yield from _answer(difference)
    yield from _modules(difference)


def _runs(difference: Difference) -> Table:
    several = any(side.ranks > 1 for side in (difference.a, difference.b))

    def row(name: str, side: Side) -> tuple[Any, ...]:
        ranks = (side.ranks,) if several else ()
        return (name, side.path, " ".join(side.command) or "-", side.steps, side.records, *ranks, side.end)

    columns = ("", "run", "command", "steps", "records", *(("ranks",) if several else ()), "end")
    return Table(columns, [row("A", difference.a), row("B", difference.b)])


def _changes(difference: Difference) -> Iterator[str]:
    for change in difference.changes:
        if change.kind == "command":
            yield _line("command", _sides(change.a or "nothing", change.b or "nothing"))
        elif change.kind in ("version", "config"):
            yield _line(change.name, _sides(_value(change.a), _value(change.b)))
    for kind, label in _MODULE_CHANGES.items():
        found = [_module_change(change) for change in difference.changes if change.kind == kind]
        if found:
            yield _line(label, _some(found))
    for scalar in difference.scalars:
        rank = f" of rank {scalar.rank}" if len(difference.overlap.ranks) > 1 else ""
        values = _sides(*_numbers(scalar.a, scalar.b))
        yield _line(f"{scalar.tensor} {scalar.path}", f"{values}, from step {scalar.step} on{rank}")
    for label, kinds in (("dtype", difference.dtypes), ("device", difference.devices)):
        if kinds:
            yield _line(label, "; ".join(_kinds(one, difference.compared) for one in kinds))


def _module_change(change: Change) -> str:
    if change.kind == "module_renamed":
        return f"{change.a} in A is {change.b} in B"
    if change.kind == "module_removed":
        return f"{module_label(change.name)} ({change.a})"
    if change.kind == "module_added":
        return f"{module_label(change.name)} ({change.b})"
    return f"{module_label(change.name)} {_sides(change.a or 'none', change.b or 'none')}"


def _kinds(kinds: Kinds, compared: int) -> str:
    of = "all records" if kinds.records == compared else f"{kinds.records:,} of {compared:,} records"
    return f"{of} {_sides(kinds.a, kinds.b)}"


def _coverage(difference: Difference) -> Iterator[str]:
    """Say what was compared, and what could not be."""
    overlap = difference.overlap
    span = (
        f"step {overlap.first}" if overlap.steps == 1 else f"{overlap.steps:,} steps, {overlap.first} to {overlap.last}"
    )
    parts = [counted(difference.compared, "record"), span]
    for count, name in ((overlap.only_a, "A"), (overlap.only_b, "B")):
        if count:
            parts.append(f"{counted(count, 'more step')} in {name}")
    if len(overlap.ranks) > 1:
        parts.append(f"{len(overlap.ranks)} ranks")
    yield _line("compared", "; ".join(parts))
    if not difference.modules_compared:
        yield _line("", "no module in common: are these runs of the same model?")
    if overlap.full < overlap.steps:
        words = "was" if overlap.steps - overlap.full == 1 else "were"
        yield _line("", f"{counted(overlap.steps - overlap.full, 'step')} {words} not captured in full by both")
    for ranks, name in ((overlap.ranks_only_a, "A"), (overlap.ranks_only_b, "B")):
        if ranks:
            yield _line("not", f"rank {', '.join(map(str, ranks))} of {name}")
    for unmatched, name in ((difference.only_a, "A"), (difference.only_b, "B")):
        if unmatched:
            yield _line(f"{name} alone", _unmatched(unmatched))


def _unmatched(unmatched: Sequence[Unmatched]) -> str:
    records = sum(one.records for one in unmatched)
    first = min(one.first_step for one in unmatched)
    names = _some([f"{module_label(one.module)} ({one.records:,})" for one in unmatched])
    return f"has {counted(records, 'record')} in common steps, from step {first} on: {names}"


def _answer(difference: Difference) -> Iterator[str | Table]:
    pair = difference.first
    if pair is None:
        both = " that both have" if difference.only_a or difference.only_b else ""
        yield f"No difference in {counted(difference.compared, 'record')}{both} ({_tolerances(difference)})."
        return
    kind = f" ({difference.first_type})" if difference.first_type else ""
    row = pair.a
    rank = f", rank {row.rank}" if len(difference.overlap.ranks) > 1 else ""
    call = f" of call {row.call}" if row.call else ""
    micro = f", pass {row.micro_step}" if row.micro_step else ""
    yield (
        f"First difference: step {row.step}{micro}{rank}, {row.phase}, {module_label(row.module)}{kind}, "
        f"{_tensor(row)}{call}"
    )
    yield f"  {_words(pair)}"
    yield ""
    columns = ("", "dtype", "shape", "device", "min", "max", "norm", "nan", "inf")
    yield Table(columns, [("A", *_statistics(pair.a)), ("B", *_statistics(pair.b))])


def _words(pair: Pair) -> str:
    if pair.statistic in _WORDS:
        one, other = (getattr(row, pair.statistic) or 0 for row in (pair.a, pair.b))
        return _sides(*(f"{count:,} {_WORDS[pair.statistic]}" for count in (one, other)))
    if pair.statistic == "shape":
        return f"shape {_sides(pair.a.shape, pair.b.shape)}"
    values = _sides(*_numbers(getattr(pair.a, pair.statistic), getattr(pair.b, pair.statistic)))
    tolerated = f"{_percent(pair.tolerance)} is tolerated" if pair.tolerance else "these must be equal"
    return f"{_what(pair)} {values}, {_percent(pair.difference)} apart ({tolerated})"


def _what(pair: Pair) -> str:
    """Name the statistic; the only element of a scalar is its smallest and largest at once."""
    if pair.a.numel == pair.b.numel == 1 and pair.statistic in _FINITE:
        return "value"
    return _WORDS.get(pair.statistic, pair.statistic)


def _tolerances(difference: Difference) -> str:
    """Name the tolerances of the types, each number once."""
    by_number: dict[float, list[str]] = {}
    for dtype, tolerance in difference.tolerances.items():
        by_number.setdefault(tolerance, []).append(dtype)
    words = [
        f"{_percent(number)} tolerated in {', '.join(dtypes)}" if number else f"{', '.join(dtypes)} must be equal"
        for number, dtypes in sorted(by_number.items(), reverse=True)
    ]
    return "; ".join(words)


def _modules(difference: Difference) -> Iterator[str | Table]:
    if not difference.modules:
        return
    yield ""
    yield (
        f"Furthest apart: {difference.differing:,} of {counted(difference.compared, 'record')} differ, in "
        f"{difference.modules_differing:,} of {counted(difference.modules_compared, 'module')}"
    )
    columns = ("module", "differ", "of", "since step", "most at", "there", "what", "A", "B", "apart")
    yield Table(columns, [_row(line) for line in difference.modules])


def _row(line: ModuleDifference) -> tuple[Any, ...]:
    pair = line.worst
    name = pair.statistic
    values = (getattr(pair.a, name), getattr(pair.b, name))
    return (
        module_label(line.module),
        line.differing,
        line.compared,
        line.first.a.step,
        pair.a.step,
        _tensor(pair.a),
        _what(pair),
        *(_rounded(value) if isinstance(value, float) else value for value in values),
        _percent(pair.difference) if name in _FINITE else "",
    )


def _statistics(row: Record) -> tuple[Any, ...]:
    infinite = (row.posinf_count or 0) + (row.neginf_count or 0)
    numbers = (_rounded(value) for value in (row.min, row.max, row.norm))
    return (row.dtype, row.shape, row.device, *numbers, row.nan_count or 0, infinite)


def _line(label: str, words: str) -> str:
    return f"  {label.ljust(_LABEL - 1)} {words}"


def _sides(a: Any, b: Any) -> str:
    return f"{a} in A, {b} in B"


def _tensor(row: Record) -> str:
    return f"{row.tensor} {row.path}".strip()


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def _rounded(value: float | None) -> Decimal | float | None:
    """Return a number of four digits that still counts as one: a table aligns it to the right."""
    return Decimal(f"{value:.4g}") if value is not None and math.isfinite(value) else value


def _numbers(a: float | None, b: float | None) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to tell them apart, at least six."""
    if a is None or b is None:
        return _value(a), _value(b)
    for digits in range(_DIGITS, _MOST_DIGITS):
        if f"{a:.{digits}g}" != f"{b:.{digits}g}":
            return f"{a:.{digits}g}", f"{b:.{digits}g}"
    return repr(a), repr(b)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _NAMES} more" if len(words) > _NAMES else ""
    return ", ".join(words[:_NAMES]) + more
