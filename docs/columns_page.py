"""The generated parts of columns.md: the table of columns from the schema, that of the views from the views themselves.

``page`` takes the page and returns it with these parts made anew; the rest of it is written by hand.
"""

from __future__ import annotations

import re

from gradtrace.analysis.catalog import describe
from gradtrace.analysis.views import add_records, add_views, native_connection
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import COLUMNS

_WITH_COLUMNS_OF_THEIR_OWN = ("steps", "modules", "events", "meta")
"""The other views, ``params`` and ``grads``, have the columns of ``records``."""


def page(text: str) -> str:
    """Return the page's text with its tables made anew.

    Raises:
        ValueError: the text lacks the marks of a table.
    """
    for name, lines in (("columns", _columns()), ("views", _views())):
        part = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->\n)", flags=re.DOTALL)
        body = "".join(f"{line}\n" for line in lines)
        text, count = part.subn(lambda marks, body=body: f"{marks[1]}{body}{marks[2]}", text)
        if count != 1:
            raise ValueError(f"the page has {count} tables of {name}; it is to have one")
    return text


def _columns() -> list[str]:
    rows = [(f"`{column.name}`", column.type, column.unit, column.meaning) for column in COLUMNS]
    return _table(("column", "type", "unit", "meaning"), rows)


def _views() -> list[str]:
    run = _NoRecords()
    rows = [
        (f"`{view}`", f"`{name}`", kind, unit, meaning)
        for view, name, kind, unit, meaning in describe(run)  # type: ignore[arg-type]
        if view in _WITH_COLUMNS_OF_THEIR_OWN
    ]
    return _table(("view", "column", "type", "unit", "meaning"), rows)


class _NoRecords:
    """A recording without records: its views have all of their columns."""

    def __init__(self) -> None:
        connection = native_connection()
        add_records(connection, [], [])
        add_views(connection, [RunInfo("")])
        self.execute = connection.execute


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [_line(head), "|---" * len(head) + "|", *map(_line, rows)]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
