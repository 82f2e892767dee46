"""The parts of the page that need no script, as HTML: facts, notes, the verdict and the way of the failure.

All text is escaped: names of modules and words of exceptions are other people's. Words are made printable first, as on
a terminal: a name that turns the direction of writing would take the rest of its line with it. Cells of tables, which
stand alone, hold names as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gradtrace.analysis import verdict_text
from gradtrace.analysis.labels import module_label
from gradtrace.analysis.tabular import counted
from gradtrace.analysis.verdict_text import Table
from gradtrace.printable import html_text, html_words
from gradtrace.trace.schema import Record

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording
    from gradtrace.analysis.report.path import Stop
    from gradtrace.analysis.verdict_model import Verdict

_LABELLED = 13
"""Where the text of a labelled line of the verdict starts."""

_MEND = "Usual mend: "


def facts(run: Recording) -> str:
    """Return what is said of the run on one line: command, size, ranks, versions, end."""
    info, captured = run.info, run.captured
    known = [
        counted(run.steps, "step"),
        f"{captured:,} captured in full" if captured < run.steps else "",
        f"{len(run.infos)} ranks" if len(run.infos) > 1 else "",
        counted(len(info.modules), "module"),
        counted(sum(one.records for one in run.infos), "record"),
        ", ".join(f"{name} {version}" for name, version in info.versions.items()),
        f"gradtrace {info.gradtrace_version}" if info.gradtrace_version else "",
        f"started {info.started[:19].replace('T', ' ')} UTC" if info.started else "",
        run.end,
    ]
    command = [f"<code>{html_words(' '.join(info.command))}</code>"] if info.command else []
    return " · ".join([*command, *(html_words(fact) for fact in known if fact)])


def notes(remarks: Iterable[str]) -> str:
    """Return a paragraph for each remark on what the page or the recording lacks."""
    return "\n".join(f'<p class="note">{html_words(text)}</p>' for text in remarks)


def verdict(found: Verdict, path: Sequence[Stop | int]) -> str:
    """Return the verdict in the words of ``first-nan``, with the way of the failure."""
    blocks = list(verdict_text.report(found))
    sections = [list(group) for empty, group in groupby(blocks, lambda block: block == "") if not empty]
    if not sections:
        return ""
    mends = [str(block) for section in sections for block in section if str(block).startswith(_MEND)]
    further = [section for section in sections[1:] if str(section[0]) not in mends]
    headline, *answer = sections[0]
    parts = [
        f'<p class="headline">{html_words(str(headline))}</p>',
        _definitions(answer) if found.found else "".join(f"<p>{html_words(str(line))}</p>" for line in answer),
        *(f'<p class="mend"><strong>Usual mend</strong> {html_words(text.removeprefix(_MEND))}</p>' for text in mends),
        _path(path, next((str(line)[_LABELLED:] for line in answer if str(line).startswith("  reached ")), "")),
        *(_section(section) for section in further),
    ]
    return "\n".join(filter(None, parts))


def _definitions(lines: Iterable[str | Table]) -> str:
    pairs = ((str(line)[:_LABELLED].strip(), str(line)[_LABELLED:]) for line in lines)
    return f"<dl>{''.join(f'<dt>{html_words(label)}</dt><dd>{html_words(text)}</dd>' for label, text in pairs)}</dl>"


def _section(blocks: Sequence[str | Table]) -> str:
    title, *rest = blocks
    body = "".join(
        _table(block) if isinstance(block, Table) else f'<p class="lines value">{html_words(block)}</p>'
        for block in rest
    )
    return f"<details><summary>{html_words(str(title))}</summary>{body}</details>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{html_words(name)}</th>" for name in table.columns)
    body = "".join(_row(row) for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Sequence[Any]) -> str:
    marked = ' class="marked"' if row[0] == ">" else ""
    return f"<tr{marked}>{''.join(map(_cell, row))}</tr>"


def _cell(value: Any) -> str:
    numeric = ' class="number"' if value is None or isinstance(value, (int, float, Decimal)) else ""
    return f"<td{numeric}>{html_text('-' if value is None else str(value))}</td>"


def _path(path: Sequence[Stop | int], reached: str) -> str:
    if not path:
        return ""
    stops = "".join(_stop(stop) for stop in path)
    end = f'<li class="reached"><span class="when">then</span> reached {html_words(reached)}</li>' if reached else ""
    return f'<h3>Path of the failure</h3><ol class="path">{stops}{end}</ol>'


def _stop(stop: Stop | int) -> str:
    if isinstance(stop, int):
        return f'<li class="passed-on"><span class="when">and on through {counted(stop, "more place")}</span></li>'
    row, fate = stop.first, stop.fate.value if stop.fate else ""
    tensors = ", ".join(dict.fromkeys(f"{one.tensor} {one.path}".strip() for one in stop.records))
    place = " ".join(filter(None, ("" if row.module is None else module_label(row.module), tensors)))
    mark = f'<span class="fate">{html_words(fate)}</span>' if fate else ""
    return (
        f'<li class="{fate.replace(" ", "-") or "finite"}">'
        f'<span class="when">step {row.step}, {html_words(row.phase)}</span>'
        f'<span class="place">{html_words(place)}</span><span class="value">{_held(stop.records)}</span>{mark}</li>'
    )


def _held(records: Sequence[Record]) -> str:
    """Return in words what the records hold that is not finite, or else their range."""
    row = max(records, key=lambda one: one.nonfinite_count)
    infinite = (row.posinf_count or 0) + (row.neginf_count or 0)
    counts = " and ".join(f"{count:,} {name}" for count, name in ((row.nan_count, "nan"), (infinite, "inf")) if count)
    if counts:
        return f"{counts} of {row.numel:,}" if (row.numel or 0) > 1 else counts.removeprefix("1 ")
    if row.min is None or row.max is None:
        return ""
    return f"{row.max:.4g}" if row.numel == 1 else f"{row.min:.4g} to {row.max:.4g}"


def name_of(run: Recording) -> str:
    """Return the name of the run's file, without the folders that it lies in."""
    return os.path.basename(os.path.normpath(run.path)) or run.path
