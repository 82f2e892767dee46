"""Tables for people: aligned text; one that is wider than its terminal has its cells folded, by rich."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from gradtrace.analysis.tabular import aligned, is_number
from gradtrace.printable import printable, shortened, width

Row = Sequence[Any]
Show = Callable[[Any], str]


def lines(columns: Sequence[str], rows: Sequence[Row], show: Show, most: int | None) -> Iterator[str]:
    """Yield the lines of a table, each with its line break: names of columns, a rule, the rows, numbers to the right.

    ``show`` makes text of a value. With ``most``, the width of a terminal, long cells lose their middle, and where that
    is not enough cells are folded; without it no name is ever cut.
    """

    def cell(value: Any) -> str:
        text = show(value)
        return printable(text if most is None else shortened(text))

    numeric = [any(is_number(row[index]) for row in rows) for index in range(len(columns))]
    heads = [cell(name) for name in columns]
    text = aligned(heads, lambda: (map(cell, row) for row in rows), numeric)
    rule = next(text), next(text)
    if most is None or width(rule[1]) <= most:
        yield from (f"{line}\n" for line in (*rule, *text))
    else:
        yield from _folded(heads, [[cell(value) for value in row] for row in rows], numeric, most)


def terminal_width(out: TextIO) -> int | None:
    """Return the width of the terminal that ``out`` is, None where it is none."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def _folded(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], most: int) -> Iterator[str]:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    underlined = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
    grid = Table(box=underlined, show_edge=False, pad_edge=False)
    for name, is_right in zip(heads, numeric, strict=True):
        grid.add_column(Text(name), justify="right" if is_right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=most, color_system=None, highlight=False).print(grid)
    for line in out.getvalue().splitlines():
        yield f"{line.rstrip()}\n"
