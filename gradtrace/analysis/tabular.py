"""Answers that are tables: as a DataFrame, as an Arrow table, as HTML for a notebook. Knows no run and no question."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gradtrace.errors import MissingPackageError

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 60
"""Most rows of a table in a notebook."""


class Tabular(ABC):
    """What can be looked at as a table. Values are plain Python ones, None is NULL."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Names of the columns."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Sequence[Any]]:
        """All rows, each with a value for every column."""

    def df(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingPackageError("a DataFrame needs pandas: pip install pandas") from None
        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        import pyarrow as pa

        return pa.table({name: [row[index] for row in self.rows] for index, name in enumerate(self.columns)})

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table of the first rows, with all text escaped; a last line says how many rows there are more."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows[:_SHOWN])
    more = f"<p>{len(rows) - _SHOWN:,} more rows</p>" if len(rows) > _SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cells(row: Iterable[Any]) -> str:
    return "".join(f"<td>{html.escape(_shown(value))}</td>" for value in row)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return str(value)
