"""A verdict for a notebook: the words of ``verdict_text``, loud where it matters, readable on light and dark pages.

Everything that a script or a recording could have named is made printable and escaped, and no text has a colour of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from gradtrace.analysis.tabular import html_table
from gradtrace.analysis.verdict_model import Verdict
from gradtrace.analysis.verdict_text import Table, notes, report
from gradtrace.printable import html_words

_FOUND = "border-left:0.3em solid crimson;padding-left:0.6em;font-size:1.15em;font-weight:bold"
_LINES = "margin:0.4em 0;white-space:pre-wrap"


def html(verdict: Verdict) -> str:
    """Return the whole verdict as HTML; with something found the first line stands out."""
    first, *rest = report(verdict)
    style = f' style="{_FOUND}"' if verdict.found else ""
    remarks = [f"note: {note}" for note in notes(verdict)]
    return f"<div><p{style}>{html_words(str(first))}</p>{''.join(_blocks([*rest, '', *remarks]))}</div>"


def _blocks(blocks: list[str | Table]) -> Iterator[str]:
    """Yield each table, and each paragraph: lines up to a table or an empty line."""
    for _, group in groupby(blocks, key=lambda block: "table" if isinstance(block, Table) else block != ""):
        found = list(group)
        yield from (html_table(block.columns, block.rows) for block in found if isinstance(block, Table))
        lines = [block for block in found if isinstance(block, str) and block]
        if lines:
            yield f'<pre style="{_LINES}">{chr(10).join(map(html_words, lines))}</pre>'
