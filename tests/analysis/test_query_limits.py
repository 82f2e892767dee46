"""What a query may take: time and memory end, in one line, and only what DuckDB itself takes counts."""

from __future__ import annotations

import time

import pytest
from traces import write_run

from gradtrace.analysis import limits
from gradtrace.analysis.run import open_run
from gradtrace.analysis.sandbox import query_errors
from gradtrace.errors import NotARunError, QueryLimitError
from gradtrace.trace.schema import Record

NEVER_DONE = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range + b.range = -1"
NO_END_OF_ROWS = "SELECT md5(range::VARCHAR) FROM range(1000000000000)"
TOO_LONG = r"^the query took longer than \d(\.\d)? s; a larger timeout allows it$"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run("run.parquet", [Record(step, step, "forward", "output", "m", max=1.0) for step in range(6)])
    with open_run("run.parquet") as opened:
        yield opened


@pytest.mark.parametrize(
    "query",
    [
        NEVER_DONE,
        "SELECT count(*) FROM generate_series(1, 1000000000000000000)",
        "WITH RECURSIVE t AS (SELECT 1 a UNION ALL SELECT a + 1 FROM t) SELECT count(*) FROM t",
    ],
)
def test_a_query_that_does_not_end_is_ended(run, query):
    started = time.monotonic()
    with pytest.raises(QueryLimitError, match=TOO_LONG):
        run.sql(query, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 60


@pytest.mark.parametrize("take", [lambda result: result.rows, lambda result: result.df()])
def test_the_time_to_fetch_counts(run, take):
    result = run.sql(NO_END_OF_ROWS, timeout=1)
    with pytest.raises(QueryLimitError, match=TOO_LONG):
        take(result)


def test_an_arrow_table_is_in_time_or_not_at_all(run):
    assert run.sql("SELECT 1 FROM range(3)", timeout=60).arrow().num_rows == 3
    result = run.sql(NO_END_OF_ROWS, timeout=1)
    with pytest.raises(QueryLimitError, match=TOO_LONG):
        result.arrow()


def test_the_time_that_its_rows_are_looked_at_does_not_count(run):
    seen = 0
    for (number,) in run.sql("SELECT range FROM range(25000)", timeout=1.0):
        seen += 1
        if number % 12_000 == 0:
            time.sleep(0.6)
    assert seen == 25_000


def test_a_refused_query_is_refused_for_what_it_is(run):
    with pytest.raises(Exception, match="syntax error"):
        run.sql("selec", timeout=60)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM range(20000000) ORDER BY hash(range)",
        "SELECT length(list(range)) FROM range(1000000000)",
        "SELECT count(*) FROM (SELECT DISTINCT hash(range) FROM range(100000000))",
    ],
)
def test_a_query_that_needs_more_memory_is_ended_and_leaves_nothing(run, tmp_path, query):
    with pytest.raises(QueryLimitError, match=r"^the query needs more memory than 48 MiB"):
        _ = run.sql(query, memory=48 * 2**20).rows
    assert [path.name for path in tmp_path.iterdir()] == ["run.parquet"]
    assert run.sql("SELECT count(*) FROM records", memory=48 * 2**20).rows == [(6,)]


def test_a_limit_below_what_the_recording_takes_says_so(run):
    with pytest.raises(QueryLimitError, match="more memory than 0 MiB"):
        run.sql("SELECT count(*) FROM records", memory=1)


def test_by_default_half_of_the_free_memory_is_allowed(run, monkeypatch):
    monkeypatch.setattr(limits, "_free", lambda: 200 * 2**20)
    assert run.sql("SELECT current_setting('memory_limit')").rows == [("100.0 MiB",)]


def test_the_free_memory_is_that_of_the_machine():
    assert 2**20 < limits._free() < 2**63
    assert limits.default_memory() <= limits._of_duckdb() // 2


def test_ctrl_c_in_a_query_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt), query_errors():
        raise RuntimeError("Query interrupted")


def test_a_damaged_file_is_not_the_querys_fault():
    text = "reading the stream registered as 'parquet_rows' failed: IOError: page too short\nmore"
    with pytest.raises(NotARunError, match=r"^the recording is damaged: IOError: page too short$"), query_errors():
        raise limits.duckdb.InvalidInputException(text)
