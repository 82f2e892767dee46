"""Answers that are tables: as a DataFrame, as an Arrow table, as text and as HTML. Knows no run and no question.

Whatever stands in a cell is somebody's text: HTML escapes all of it, and colours nothing that a dark page would hide.
"""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gradtrace.errors import MissingPackageError

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 60
"""Most rows that text and HTML show of a table."""

_GAP = "   "
_CELL = "padding:0.1em 0.6em;text-align:{};white-space:pre-wrap"


class Tabular(ABC):
    """What can be looked at as a table. Values are plain Python ones, None is NULL.

    ``str()`` gives the first rows as aligned text, and a notebook shows them as HTML.
    """

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Names of the columns."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Sequence[Any]]:
        """All rows, each with a value for every column."""

    @property
    def types(self) -> Mapping[str, str]:
        """Arrow's names of the columns' types ("int64", "list<double>"); where none is given the values decide."""
        return {}

    def df(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        require_pandas()
        return self.arrow().to_pandas()

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        import pyarrow as pa

        arrays = [
            _array([row[index] for row in self.rows], self.types.get(name)) for index, name in enumerate(self.columns)
        ]
        return pa.Table.from_arrays(arrays, names=list(self.columns))

    def __str__(self) -> str:
        rows, rest = self._head()
        return "\n".join(filter(None, (text_table(self.columns, rows), rest)))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows, rest = self._head()
        return html_table(self.columns, rows) + (f"<p>{html.escape(rest)}</p>" if rest else "")

    def _head(self) -> tuple[list[Sequence[Any]], str]:
        """Return the rows that people are shown, and a word on those that they are not."""
        rest = len(self.rows) - SHOWN
        return list(self.rows[:SHOWN]), counted(rest, "more row") if rest > 0 else ""


def require_pandas() -> None:
    """Raise a ``MissingPackageError`` where pandas is not installed."""
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise MissingPackageError("a DataFrame needs pandas: pip install pandas") from None


def counted(number: int, what: str) -> str:
    """Return "1 row", "4,940 rows"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def is_number(value: Any) -> bool:
    """Whether a value belongs to the right of its cell."""
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def text_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an aligned table without a last line break, columns of numbers to the right."""
    data = [list(row) for row in rows]
    right = _numeric(columns, data)
    cells = [list(columns), *([" ".join(_shown(value).splitlines()) for value in row] for row in data)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_GAP.join(map(_justified, row, widths, right)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + len(_GAP) * (len(widths) - 1)), *lines[1:]])


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table with all text escaped, columns of numbers to the right."""
    data = [list(row) for row in rows]
    styles = [_CELL.format("right" if numeric else "left") for numeric in _numeric(columns, data)]
    lines = "".join(f"<tr>{_html_cells('td', map(_shown, row), styles)}</tr>" for row in data)
    return f"<table><thead><tr>{_html_cells('th', columns, styles)}</tr></thead><tbody>{lines}</tbody></table>"


def _html_cells(tag: str, texts: Iterable[str], styles: Iterable[str]) -> str:
    pairs = zip(texts, styles, strict=True)
    return "".join(f'<{tag} style="{style}">{html.escape(text)}</{tag}>' for text, style in pairs)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    return [any(is_number(row[index]) for row in rows) for index in range(len(columns))]


def _justified(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def _shown(value: Any) -> str:
    """Return a cell's text; six digits leave 65504, the largest number of float16, as it is."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _array(values: list[Any], kind: str | None) -> pa.Array[Any]:
    """Return a column of the type called ``kind``; without one, of what Arrow sees in it, else of text.

    Integers that are too large for Arrow, alone or among floats, become floats.
    """
    import pyarrow as pa

    column: pa.Array[Any]
    try:
        column = pa.array(values, None if kind is None else _type(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        if kind is not None:
            raise
        convert: Callable[[Any], Any] = float if all(value is None or is_number(value) for value in values) else str
        column = pa.array([None if value is None else convert(value) for value in values])
    return column


def _type(kind: str) -> pa.DataType:
    import pyarrow as pa

    if kind.startswith("list<"):
        return pa.list_(_type(kind[len("list<") : -1]))
    alias: Any = kind  # the stubs know a type's name only where it is written out
    found: pa.DataType = pa.type_for_alias(alias)
    return found
