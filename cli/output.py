"""How data looks on stdout: tables, csv, json, jsonl, markdown, and sparklines.

Values that are not finite are ``nan``, ``inf`` and ``-inf`` in text and the strings "NaN", "Infinity" and
"-Infinity" in JSON, never bare tokens. NULL is ``-`` in tables, empty in csv, ``null`` in JSON.

Names are other people's. Tables and markdown show what is not printable as escapes. JSON has it as JSON's own escapes,
so that it reads back as it was; csv has it as it is, but on a terminal as escapes, too. csv is not written for
spreadsheets, which take a name that begins with ``=`` for a formula.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TextIO

from gradtrace.analysis.sparkline import BLOCKS
from gradtrace.analysis.sparkline import sparkline as blocks_of
from gradtrace.analysis.tabular import is_number
from gradtrace.printable import json_line, printable, shortened

from . import tables
from .lines import line, put

if TYPE_CHECKING:
    from gradtrace.analysis.verdict_text import Table

FORMATS = ("table", "csv", "json", "jsonl", "markdown")

_ASCII_BLOCKS = ".:-=+*#@"
_ACTS_IN_MARKDOWN = re.compile(r"[\\`*|]|(?<=\])\(|(?<![^\W_])_|_(?![^\W_])")

Row = Sequence[Any]


def write(out: TextIO, form: str, columns: Sequence[str], rows: Iterable[Row], *, digits: int | None = None) -> None:
    """Write rows to a stream in one of ``FORMATS``; all but tables and markdown go out row by row.

    ``digits`` limits the significant digits of tables and markdown, which are for people.
    """
    if form == "table":
        data = [tuple(row) for row in rows]
        found = tables.lines(columns, data, lambda value: _cell(value, digits), tables.terminal_width(out))
    elif form == "markdown":
        found = _markdown(columns, rows, digits, show=shortened if out.isatty() else str)
    elif form == "csv":
        found = _csv(columns, rows, show=printable if out.isatty() else str)
    else:
        found = _json(columns, rows, lines=form == "jsonl")
    for one in found:
        put(out, one, is_json=form in ("json", "jsonl"))


def write_blocks(out: TextIO, blocks: Iterable[str | Table]) -> None:
    """Write the lines and tables of an answer in words."""
    for block in blocks:
        if isinstance(block, str):
            line(block, out)
        else:
            write(out, "table", block.columns, block.rows)


def write_json(value: Any) -> None:
    """Write one JSON value on a line of its own to stdout."""
    put(sys.stdout, f"{json_text(value)}\n", is_json=True)


def text(value: Any) -> str:
    """Return a value as text; of containers, as the JSON that holds it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple, dict)):
        return json_text(value)
    return value.isoformat(" ") if isinstance(value, datetime.datetime) else str(value)


def json_text(value: Any) -> str:
    """Return a value as JSON on one line, in which every number is one that JSON knows."""
    return json_line(json.dumps(json_value(value), allow_nan=False, ensure_ascii=False))


def json_value(value: Any) -> Any:
    """Return a value made of what JSON knows; non-finite numbers become their names."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _name(value)
    if isinstance(value, decimal.Decimal):
        return json_value(float(value))
    if isinstance(value, dict):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def sparkline(values: Sequence[float | None], out: TextIO) -> str:
    """Return the sparkline of a series, of characters that the encoding of ``out`` has."""
    return blocks_of(values, BLOCKS if _can_encode(out, BLOCKS) else _ASCII_BLOCKS)


def _can_encode(out: TextIO, characters: str) -> bool:
    try:
        characters.encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _cell(value: Any, digits: int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if digits and isinstance(value, float) else text(value)


def _csv(columns: Sequence[str], rows: Iterable[Row], *, show: Callable[[str], str]) -> Iterator[str]:
    for row in chain([columns], rows):
        yield _csv_line([show("" if value is None else text(value)) for value in row])


def _csv_line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    # Of line breaks some releases of Python quote only their own.
    if any("\r" in cell for cell in cells):
        csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow(cells)
    else:
        csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def _markdown(
    columns: Sequence[str], rows: Iterable[Row], digits: int | None, *, show: Callable[[str], str]
) -> Iterator[str]:
    data = [list(row) for row in rows]
    right = [any(is_number(row[index]) for row in data) for index in range(len(columns))]
    yield _markdown_line([_markdown_text(name) for name in columns])
    yield _markdown_line(["---:" if numeric else "---" for numeric in right])
    for row in data:
        yield _markdown_line([_markdown_text(show(_cell(value, digits))) for value in row])


def _markdown_text(words: str) -> str:
    """Return text with what markdown, or HTML in it, would act on escaped."""
    escaped = _ACTS_IN_MARKDOWN.sub(r"\\\g<0>", printable(words))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _json(columns: Sequence[str], rows: Iterable[Row], *, lines: bool) -> Iterator[str]:
    before, between, after = ("", "\n", "\n") if lines else ("[", ",\n ", "]\n")
    first = True
    for row in rows:
        yield before if first else between
        yield json_text(dict(zip(columns, row, strict=True)))
        first = False
    yield ("" if lines else "[]\n") if first else after


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
