"""gradtrace sql, on the command itself: data on stdout, notes on stderr, errors for the frame to print."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner
from gradtrace_cli.sql import sql
from traces import write_run

from gradtrace.errors import NotARunError, QueryError, RunNotFoundError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import COLUMNS, Record
from gradtrace.trace.writer import RunWriter

ROWS = [Record(step, step, "forward", "output", f"m{step % 2}", max=step / 2) for step in range(150)]


@pytest.fixture
def run(tmp_path):
    return str(write_run(tmp_path / "run.parquet", ROWS, modules=[ModuleInfo("", "Net", root=True)]))


def invoke(*arguments, **options):
    result = CliRunner().invoke(sql, arguments, **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_query_gives_a_table(run):
    result = invoke(run, "SELECT module, count(*) AS n FROM records GROUP BY 1 ORDER BY 1")
    assert result.stdout == "module    n\n-----------\nm0       75\nm1       75\n"
    assert (result.stderr, result.exit_code) == ("", 0)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("csv", "x,y,z\nnan,,inf\n"),
        ("json", '[{"x": "NaN", "y": null, "z": "Infinity"}]\n'),
        ("jsonl", '{"x": "NaN", "y": null, "z": "Infinity"}\n'),
        ("markdown", "| x | y | z |\n| ---: | --- | ---: |\n| nan | - | inf |\n"),
    ],
)
def test_the_other_formats(run, form, text):
    assert invoke(run, "SELECT 'nan'::DOUBLE x, NULL y, 'inf'::DOUBLE z", "-f", form).stdout == text


def test_a_table_stops_at_rows_and_says_so_while_other_formats_have_all(run):
    query = "SELECT seq FROM records ORDER BY seq"
    shown = invoke(run, query)
    assert len(shown.stdout.splitlines()) == 2 + 100
    assert shown.stderr == "gradtrace: note: the first 100 rows; pass --rows -1 for all\n"
    few = invoke(run, query, "--rows", "3")
    assert few.stdout.splitlines()[2:] == ["  0", "  1", "  2"]
    for arguments in (["--rows", "-1"], ["--rows", "150"], ["-f", "csv"]):
        result = invoke(run, query, *arguments)
        assert len(result.stdout.split()) >= 150
        assert result.stdout.split()[-1] == "149"
        assert result.stderr == ""


def test_a_query_from_a_file_or_stdin(run, tmp_path):
    (tmp_path / "q.sql").write_text("SELECT 41 + 1 AS answer")
    assert invoke(run, "--file", str(tmp_path / "q.sql"), "-f", "csv").stdout == "answer\n42\n"
    assert invoke(run, "--file", "-", "-f", "csv", input="SELECT 7 AS x").stdout == "x\n7\n"


def test_the_schema_explains_every_column_of_every_view(run):
    rows = json.loads(invoke(run, "--schema", "-f", "json").stdout)
    assert {row["view"] for row in rows} == {*("records", "params", "grads", "steps", "modules", "events", "meta")}
    assert [row["column"] for row in rows if row["view"] == "records"] == [column.name for column in COLUMNS]
    norm = next(row for row in rows if (row["view"], row["column"]) == ("records", "norm"))
    assert norm["type"] == "DOUBLE"
    assert norm["meaning"] == "L2 norm of the finite elements; NULL when there is none"
    assert all(row["meaning"] for row in rows)
    assert re.search(r"steps +grad_norm +DOUBLE +L2 norm", invoke(run, "--schema").stdout)


def test_a_refused_query_ends_with_where_to_look(run):
    with pytest.raises(QueryError) as error:
        invoke(run, "SELECT nrm FROM records")
    assert str(error.value).startswith('Referenced column "nrm" not found in FROM clause!\nCandidate bindings')
    assert str(error.value).endswith(f"\nsee: gradtrace sql {run} --schema")
    with pytest.raises(QueryError, match="only queries are allowed, not COPY"):
        invoke(run, "COPY records TO 'x.csv'")


def test_an_error_on_the_way_is_a_query_error(run):
    with pytest.raises(QueryError, match="Could not convert string"):
        invoke(run, "SELECT module::INTEGER FROM records", "-f", "csv")


@pytest.mark.parametrize("arguments", [[], ["SELECT 1", "--schema"], ["SELECT 1", "--file", "-"]])
def test_usage_errors(run, arguments):
    result = invoke(run, *arguments)
    assert result.exit_code == 2
    assert "give one of QUERY, --file and --schema" in result.stderr


def test_bad_files_are_errors_of_their_own(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such file"):
        invoke(str(tmp_path / "nope.parquet"), "SELECT 1")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(NotARunError, match="not a Parquet file"):
        invoke(str(tmp_path / "text.parquet"), "SELECT 1")


def test_an_unfinished_run_is_read_and_a_note_says_so(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("test"))
    writer.write(batch_of_records(ROWS[:4]))
    result = invoke(str(tmp_path / "run.parquet"), "SELECT count(*) AS n FROM records", "-f", "csv")
    assert result.stdout == "n\n4\n"
    assert result.stderr == ("gradtrace: note: the run is still being recorded; this is what there is up to step 3\n")
    writer.finish(RunInfo("test", end="completed"))


def test_json_has_no_bare_nan(run):
    text = invoke(run, "SELECT [1.0, 'nan'::DOUBLE] AS v, {'a': '-inf'::DOUBLE} AS s", "-f", "json").stdout
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == [
        {"v": [1.0, "NaN"], "s": {"a": "-Infinity"}}
    ]


def test_help_has_an_example():
    text = invoke("--help").stdout
    assert 'gradtrace sql run.parquet "select module, max(norm) from grads group by 1"' in text
