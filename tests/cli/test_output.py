"""How values look in every format: the five that tell formats apart, names of any length, sparklines."""

from __future__ import annotations

import io
import json
import math

import pytest
from gradtrace_cli.output import FORMATS, json_text, sparkline, write

COLUMNS = ["name", "value"]
ROWS = [("a", 1.5), ("b", math.nan), ("c", math.inf), ("d", -math.inf), ("e", None)]
GOLDEN = {
    "table": """\
name   value
------------
a        1.5
b        nan
c        inf
d       -inf
e          -
""",
    "csv": """\
name,value
a,1.5
b,nan
c,inf
d,-inf
e,
""",
    "json": """\
[{"name": "a", "value": 1.5},
 {"name": "b", "value": "NaN"},
 {"name": "c", "value": "Infinity"},
 {"name": "d", "value": "-Infinity"},
 {"name": "e", "value": null}]
""",
    "jsonl": """\
{"name": "a", "value": 1.5}
{"name": "b", "value": "NaN"}
{"name": "c", "value": "Infinity"}
{"name": "d", "value": "-Infinity"}
{"name": "e", "value": null}
""",
    "markdown": """\
| name | value |
| --- | ---: |
| a | 1.5 |
| b | nan |
| c | inf |
| d | -inf |
| e | - |
""",
}


def written(form, columns, rows, **options):
    out = io.StringIO()
    write(out, form, columns, rows, **options)
    return out.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_nan_inf_and_null_in_its_way(form):
    assert written(form, COLUMNS, ROWS) == GOLDEN[form]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("table", "name   value\n------------\n"),
        ("csv", "name,value\n"),
        ("json", "[]\n"),
        ("jsonl", ""),
        ("markdown", "| name | value |\n| --- | --- |\n"),
    ],
)
def test_no_rows(form, text):
    assert written(form, COLUMNS, []) == text


def test_no_name_is_cut_or_wrapped_where_there_is_no_terminal():
    name = "layers." + "very_long_name." * 60 + "weight"
    lines = written("table", ["module", "x", "y"], [(name, 1, "text"), ("a", 22, "b")]).splitlines()
    assert len(lines) == 4
    assert lines[2] == f"{name}    1   text"


def test_markup_and_separators_in_a_name_stay_as_they_are():
    assert "[bold]x[/bold]" in written("table", ["a"], [("[bold]x[/bold]",)])
    assert written("markdown", ["a"], [("x|y",)]).endswith("| x\\|y |\n")
    assert written("csv", ["a", "b"], [('x,"y', 1)]) == 'a,b\n"x,""y",1\n'


def test_digits_limit_what_people_read_and_not_the_data():
    row = [(1.23456789, 123456789)]
    assert written("table", ["a", "b"], row, digits=4).splitlines()[2].split() == ["1.235", "123456789"]
    assert written("csv", ["a", "b"], row, digits=4) == "a,b\n1.23456789,123456789\n"


def test_nested_values_are_json_and_valid():
    value = {"x": [math.nan, None, True, {"y": -math.inf}]}
    assert json_text(value) == '{"x": ["NaN", null, true, {"y": "-Infinity"}]}'
    assert json.loads(written("json", ["v"], [(value,)])) == [{"v": json.loads(json_text(value))}]
    assert written("csv", ["v"], [([1, None],)]) == 'v\n"[1, null]"\n'


class Latin(io.StringIO):
    encoding = "latin-1"


class Utf8(io.StringIO):
    encoding = "utf-8"


def test_sparklines_are_logarithmic_and_mark_what_is_missing_or_not_finite():
    values = [1.0, 10.0, 1e7, None, math.nan, math.inf, 0.0]
    assert sparkline(values, Utf8()) == "▁▂█ !!▁"
    assert sparkline(values, Latin()) == ".:@ !!."


def test_a_flat_or_empty_sparkline():
    assert sparkline([3.0, 3.0], Utf8()) == "▁▁"
    assert sparkline([], Utf8()) == ""
    assert sparkline([None, math.nan], Utf8()) == " !"
