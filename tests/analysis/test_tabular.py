"""Answers that are tables: values and types that stay, text that lines up, HTML that no name can break out of."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any

import pytest

from gradtrace.analysis.tabular import SHOWN, Tabular, html_table, text_table
from gradtrace.errors import GradtraceError, MissingPackageError

HOSTILE = """<script>alert("x")</script>'&amp;"""


class Answer(Tabular):
    """A table of literal rows."""

    def __init__(self, columns: Sequence[str], *rows: Sequence[Any], types: Mapping[str, str] | None = None) -> None:
        self._columns, self._rows, self._types = columns, rows, types or {}

    @property
    def columns(self) -> Sequence[str]:
        return self._columns

    @property
    def rows(self) -> Sequence[Sequence[Any]]:
        return self._rows

    @property
    def types(self) -> Mapping[str, str]:
        return self._types


class Cells(HTMLParser):
    """Reads a table back as a browser would: the text of its cells, and all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.mark.parametrize(
    ("values", "kind", "read"),
    [
        ([1, 2.5, None], "double", [1.0, 2.5, None]),
        ([math.inf, None, 3], "double", [math.inf, None, 3.0]),
        ([2**53 + 1, 0.5], "double", [2.0**53, 0.5]),  # the nearest float to an integer that has none
        ([2**64, -1], "double", [2.0**64, -1.0]),
        ([1, None], "int64", [1, None]),
        ([True, None], "bool", [True, None]),
        ([True, 1], "string", ["True", "1"]),
        ([1, "one", None], "string", ["1", "one", None]),
        ([[1.0, None], None, []], "list<item: double>", [[1.0, None], None, []]),
        ([[None], [2]], "list<item: int64>", [[None], [2]]),
        ([None, None], "null", [None, None]),
    ],
)
def test_the_values_decide_the_type_of_a_column(values, kind, read):
    column = Answer(["x"], *([value] for value in values)).arrow()["x"]
    assert (str(column.type), column.to_pylist()) == (kind, read)


@pytest.mark.parametrize(
    ("kind", "values", "read"),
    [
        ("double", [None, None], [None, None]),
        ("double", [3, None], [3.0, None]),
        ("int64", [], []),
        ("string", [None], [None]),
        ("bool", [None, False], [None, False]),
        ("list<double>", [[None, None], [1]], [[None, None], [1.0]]),
        ("int32", [7], [7]),
    ],
)
def test_a_type_that_is_named_is_the_type_whatever_the_values(kind, values, read):
    answer = Answer(["x"], *([value] for value in values), types={"x": kind, "elsewhere": "string"})
    column = answer.arrow()["x"]
    assert (str(column.type).replace("item: ", ""), column.to_pylist()) == (kind, read)


def test_nan_stays_nan_and_is_not_null_in_arrow():
    column = Answer(["x"], [math.nan], [None], [-math.inf]).arrow()["x"]
    assert column.null_count == 1
    assert repr(column.to_pylist()) == "[nan, None, -inf]"


def test_a_data_frame_has_the_same_columns_and_values():
    types = {"norm": "double", "norms": "list<double>", "never": "double", "name": "string"}
    answer = Answer(
        ["name", "calls", "norm", "norms", "never"],
        ["a", 3, None, [1.0, None], None],
        [None, 4, math.nan, [], None],
        types=types,
    )
    frame = answer.df()
    assert list(frame.columns) == list(answer.columns)
    assert [str(frame[name].dtype) for name in ("calls", "norm", "never")] == ["int64", "float64", "float64"]
    assert frame["calls"].tolist() == [3, 4]
    assert frame["norm"].isna().all() and frame["never"].isna().all()
    assert repr([list(map(float, series)) for series in frame["norms"]]) == "[[1.0, nan], []]"
    assert frame["name"].isna().tolist() == [False, True]


def test_a_table_without_rows_keeps_its_columns():
    answer = Answer(["step", "loss"], types={"step": "int64", "loss": "double"})
    assert list(answer.df().columns) == ["step", "loss"]
    assert [str(kind) for kind in answer.arrow().schema.types] == ["int64", "double"]
    assert str(answer) == "step   loss\n-----------"
    assert Cells(answer._repr_html_()).rows == [["step", "loss"]]


def test_two_columns_may_have_one_name():
    assert [column.to_pylist() for column in Answer(["x", "x"], [1, "a"]).arrow().columns] == [[1], ["a"]]


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match=r"^a DataFrame needs pandas: pip install pandas$") as caught:
        Answer(["x"], [1]).df()
    assert isinstance(caught.value, GradtraceError)
    assert caught.value.__suppress_context__


def test_text_lines_up_with_numbers_to_the_right():
    rows = [["fc", 1, 65504.0, True], ["a\nb", 20, None, False], [None, Decimal("1.50"), math.nan, True]]
    assert text_table(["name", "n", "norm", "ok"], rows).splitlines() == [
        "name      n    norm   ok",
        "---------------------------",
        "fc        1   65504   True",
        "a\\nb     20       -   False",
        "-      1.50     nan   True",
    ]


def test_html_is_the_same_table():
    read = Cells(html_table(["name", "norm"], [["fc", 0.0412935], [None, math.inf]]))
    assert read.rows == [["name", "norm"], ["fc", "0.0412935"], ["-", "inf"]]


def test_html_escapes_whatever_a_cell_or_a_column_is_called():
    html = html_table([HOSTILE], [[HOSTILE], [[HOSTILE]]])
    read = Cells(html)
    assert read.tags == {"table", "thead", "tbody", "tr", "th", "td"}
    assert read.rows == [[HOSTILE], [HOSTILE], [str([HOSTILE])]]
    assert "<script" not in html


def test_html_has_no_colours_of_its_own():
    assert not re.search(r"color|background|#[0-9a-f]{3}", html_table(["x"], [["a"], ["b"]]))


@pytest.mark.parametrize(("rows", "words"), [(SHOWN, ""), (SHOWN + 1, "1 more row"), (5000, "4,940 more rows")])
def test_text_and_html_show_the_first_rows_and_say_how_many_more_there_are(rows, words):
    answer = Answer(["step"], *([step] for step in range(rows)))
    lines = str(answer).splitlines()
    assert lines[2 : SHOWN + 2] == [str(step).rjust(4) for step in range(SHOWN)]
    assert lines[SHOWN + 2 :] == ([words] if words else [])
    html = answer._repr_html_()
    assert Cells(html.partition("</table>")[0]).rows[1:] == [[str(step)] for step in range(SHOWN)]
    assert html.partition("</table>")[2] == (f"<p>{words}</p>" if words else "")
