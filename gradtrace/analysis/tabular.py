"""Answers that are tables: as a DataFrame, as an Arrow table, as text and as HTML. Knows no run and no question.

Whatever stands in a cell is somebody's text: as text it is made printable, and HTML escapes all of it, and colours
nothing that a dark page would hide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from gradtrace.errors import MissingPackageError
from gradtrace.printable import html_text, printable, shortened, width

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 60
"""Most rows that text and HTML show of a table."""

_GAP = "   "
_WIDEST = 1_000
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
        return html_table(self.columns, rows) + (f"<p>{html_text(rest)}</p>" if rest else "")

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
    """Return an aligned table without a last line break, numbers to the right; long cells lose their middle."""
    data = [list(row) for row in rows]
    cells = [[printable(shortened(_shown(value))) for value in row] for row in data]
    heads = [printable(shortened(name)) for name in columns]
    return "\n".join(aligned(heads, lambda: cells, _numeric(columns, data)))


def aligned(heads: Sequence[str], rows: Callable[[], Iterable[Iterable[str]]], right: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a table of printable texts: names of columns, a rule, the rows.

    ``rows`` is called twice, for the widths and for the lines: a table of a million rows need not be there as text.
    """
    widths = list(map(width, heads))
    for row in rows():
        # A name of a million letters sticks out; the others are not padded for it.
        widths = [max(most, min(width(cell), _WIDEST)) for most, cell in zip(widths, row, strict=True)]
    yield _joined(heads, widths, right)
    yield "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    for row in rows():
        yield _joined(row, widths, right)


def _joined(cells: Iterable[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    return _GAP.join(map(_justified, cells, widths, right)).rstrip()


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table with all text escaped, columns of numbers to the right."""
    data = [list(row) for row in rows]
    styles = [_CELL.format("right" if numeric else "left") for numeric in _numeric(columns, data)]
    lines = "".join(f"<tr>{_html_cells('td', map(_shown, row), styles)}</tr>" for row in data)
    return f"<table><thead><tr>{_html_cells('th', columns, styles)}</tr></thead><tbody>{lines}</tbody></table>"


def _html_cells(tag: str, texts: Iterable[str], styles: Iterable[str]) -> str:
    pairs = zip(texts, styles, strict=True)
    return "".join(f'<{tag} style="{style}">{html_text(text)}</{tag}>' for text, style in pairs)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    return [any(is_number(row[index]) for row in rows) for index in range(len(columns))]


def _justified(text: str, most: int, right: bool) -> str:
    blanks = " " * (most - width(text))
    return blanks + text if right else text + blanks


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
