"""How data looks on stdout: tables through rich, csv, json, jsonl, markdown, and sparklines.

Values that are not finite are ``nan``, ``inf`` and ``-inf`` in text and the strings "NaN", "Infinity" and
"-Infinity" in JSON, never bare tokens. NULL is ``-`` in tables, empty in csv, ``null`` in JSON.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from gradtrace.analysis.sparkline import BLOCKS
from gradtrace.analysis.sparkline import sparkline as blocks_of
from gradtrace.analysis.tabular import is_number

if TYPE_CHECKING:
    from gradtrace.analysis.verdict_text import Table

FORMATS = ("table", "csv", "json", "jsonl", "markdown")

_ASCII_BLOCKS = ".:-=+*#@"
_UNLIMITED = 1_000_000

Row = Sequence[Any]


def write(out: TextIO, form: str, columns: Sequence[str], rows: Iterable[Row], *, digits: int | None = None) -> None:
    """Write rows to a stream in one of ``FORMATS``; all but tables and markdown go out row by row.

    ``digits`` limits the significant digits of tables and markdown, which are for people.
    """
    if form == "table":
        out.write(table(columns, rows, width=terminal_width(out), digits=digits))
    elif form == "markdown":
        out.writelines(_markdown(columns, rows, digits))
    elif form == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([["" if value is None else text(value) for value in row] for row in rows])
    else:
        out.writelines(_json(columns, rows, lines=form == "jsonl"))


def write_blocks(out: TextIO, blocks: Iterable[str | Table]) -> None:
    """Write the lines and tables of an answer in words."""
    for block in blocks:
        if isinstance(block, str):
            out.write(f"{block}\n")
        else:
            write(out, "table", block.columns, block.rows)


def table(columns: Sequence[str], rows: Iterable[Row], *, width: int | None = None, digits: int | None = None) -> str:
    """Return an aligned table, numbers to the right. Only where it exceeds a ``width`` are cells wrapped."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    data = [list(row) for row in rows]
    underlined = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
    grid = Table(box=underlined, show_edge=False, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = any(is_number(row[index]) for row in data)
        grid.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in data:
        grid.add_row(*(Text(_cell(value, digits)) for value in row))
    out = io.StringIO()
    Console(file=out, width=width or _UNLIMITED, color_system=None, highlight=False).print(grid)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def terminal_width(out: TextIO) -> int | None:
    """Return the width of the terminal that ``out`` is, None where it is none."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def text(value: Any) -> str:
    """Return a value as text; of containers, as the JSON that holds it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple, dict)):
        return json_text(value)
    return value.isoformat(" ") if isinstance(value, datetime.datetime) else str(value)


def json_text(value: Any) -> str:
    """Return a value as JSON on one line, in which every number is one that JSON knows."""
    return json.dumps(json_value(value), allow_nan=False, ensure_ascii=False)


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


def _markdown(columns: Sequence[str], rows: Iterable[Row], digits: int | None) -> Iterator[str]:
    data = [list(row) for row in rows]
    right = [any(is_number(row[index]) for row in data) for index in range(len(columns))]
    yield _markdown_line(columns)
    yield _markdown_line(["---:" if numeric else "---" for numeric in right])
    for row in data:
        yield _markdown_line([_cell(value, digits).replace("|", "\\|").replace("\n", " ") for value in row])


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
