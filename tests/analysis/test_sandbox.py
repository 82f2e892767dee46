"""Run.sql answers queries and nothing else: no other file, no change, no settings."""

from __future__ import annotations

import datetime
import json
import re
import tempfile
from pathlib import Path

import pytest
from traces import write_run

from gradtrace.analysis.run import Run, open_run
from gradtrace.errors import QueryError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

ROWS = [Record(step, step, "forward", "output", f"m{step % 2}", max=step / 2) for step in range(6)]


@pytest.fixture(params=["finished", "recording", "ranks"])
def run(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if request.param == "recording":
        writer = RunWriter("run.parquet", RunInfo("test"), rows_per_part=2)
        for row in ROWS:
            writer.write(batch_of_records([row]))
    else:
        write_run("run.parquet", ROWS, world_size=2 if request.param == "ranks" else 1)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / ".tmp").mkdir()  # where DuckDB puts what does not fit into memory, and lets queries read and write
    (tmp_path / ".tmp" / "other.csv").write_text("a,b\n1,2\n")
    with open_run(tmp_path / "run.parquet") as opened:
        yield opened
    if request.param == "recording":
        writer.finish(RunInfo("test", end="completed"))


@pytest.fixture
def one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run("run.parquet", ROWS)
    with open_run("run.parquet") as opened:
        yield opened


def files(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM records",
        "FROM records SELECT count(*)",
        "  /* a */ -- b\n ( select count(*) from records ) ;",
        "WITH x AS (SELECT * FROM records) SELECT count(*) FROM x",
        "SELECT 6 FROM (PIVOT records ON tensor USING count(*)) LIMIT 1",
        "VALUES (6)",
    ],
)
def test_queries_are_answered(run, query):
    assert run.sql(query).rows == [(6,)]


def test_statements_that_only_tell_are_queries(run):
    assert run.sql("DESCRIBE records").rows[1][:2] == ("step", "BIGINT")
    assert ("records",) in run.sql("SHOW TABLES").rows
    assert run.sql("SUMMARIZE records").columns[0] == "column_name"
    assert "records" not in run.sql("EXPLAIN SELECT 1").rows[0][1]
    assert run.sql("PIVOT records ON module USING count(*) GROUP BY tensor").columns == ["tensor", "m0", "m1"]


def reading(path: Path) -> list[str]:
    return [
        "SELECT * FROM 'other.csv'",
        "SELECT * FROM read_csv('other.csv')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_blob('other.csv')",
        "SELECT * FROM glob('*')",
        "SELECT * FROM sniff_csv('other.csv')",
        f"SELECT * FROM read_parquet('{path}')",
        f"SELECT * FROM read_parquet('{path}/*.parquet')",
        "SELECT * FROM read_parquet('/dev/fd/3')",
        "SELECT * FROM read_parquet('https://example.com/x.parquet')",
        "SELECT getenv('HOME')",
        "SELECT * FROM read_text('.tmp/other.csv')",
        "SELECT * FROM glob('.tmp/*')",
        "DESCRIBE SELECT * FROM read_text('.tmp/other.csv')",
        "SUMMARIZE FROM '.tmp/other.csv'",
        "SELECT * FROM duckdb_extensions()",  # reads a directory
        "SELECT * FROM sql_auto_complete('SELECT * FROM other')",  # an extension, to be fetched
        "SELECT current_setting('s3_secret_access_key')",
        "SELECT * FROM sqlite_scan('other.db', 't')",
        "SELECT * FROM 'other.xlsx'",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''other.csv'')'))",
        "SELECT * FROM query('SELECT * FROM read_text(''other.csv'')')",
        "SELECT * FROM run",  # a Python variable where the query is asked
    ]


def writing(path: Path) -> list[str]:
    plain = f"'{path}' (FORMAT csv, USE_TMP_FILE false)"
    return [
        "CREATE TABLE t (x INTEGER)",
        "CREATE VIEW v AS SELECT 1",
        "CREATE TABLE t AS PIVOT records ON module USING count(*)",
        "INSERT INTO module_table SELECT * FROM module_table",
        "DELETE FROM module_table",
        "UPDATE module_table SET type = 'x'",
        "DROP VIEW records",
        "ALTER VIEW records RENAME TO r",
        f"COPY records TO {plain}",
        f"COPY (SELECT 1) TO '{path}'",
        f"COPY (PIVOT records ON module USING count(*)) TO {plain}",
        f"EXPLAIN ANALYZE COPY (SELECT 1) TO {plain}",
        f"WITH x AS (COPY (SELECT 1) TO {plain}) SELECT 1",
        f"SELECT * FROM query('WITH x AS (COPY (SELECT 1) TO ''{path}'' (FORMAT csv)) SELECT 1')",
        "WITH x AS (COPY (SELECT 1) TO '.tmp/new.csv') SELECT 1",
        "WITH x AS (COPY (SELECT 1) TO '.tmp/other.csv' (FORMAT csv, USE_TMP_FILE false)) SELECT 1",
        "WITH x AS (COPY (SELECT 1) TO '/dev/fd/1' (FORMAT csv)) SELECT 1",
        "SELECT write_log('x') FROM enable_logging(level = 'trace', storage = 'file', storage_path = '.tmp/log')",
        "SELECT * FROM enable_profiling(save_location = '.tmp/profile.json')",
        "CREATE SECRET s (TYPE http, BEARER_TOKEN 'x')",
        "SET VARIABLE x = 1",
        "COPY FROM DATABASE memory TO other",
        "FORCE CHECKPOINT",
        "SELECT * FROM force_checkpoint()",
        "EXPORT DATABASE 'exported'",
        "IMPORT DATABASE 'exported'",
        "ATTACH 'other.db'",
        "DETACH memory",
        "INSTALL httpfs",
        "LOAD json",
        "SET enable_external_access = true",
        "SET threads = 1",
        "RESET threads",
        "PRAGMA enable_profiling",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "CALL enable_logging()",
        "SELECT * FROM enable_logging(storage = 'file', storage_path = 'logged')",
        "SELECT * FROM enable_profiling()",
        "BEGIN",
        "CHECKPOINT",
        "VACUUM",
        "USE memory",
        "PREPARE p AS SELECT 1",
        "EXECUTE p",
        "COMMENT ON VIEW records IS 'x'",
    ]


@pytest.mark.parametrize("run", ["finished", "recording"], indirect=True)
@pytest.mark.parametrize("kind", [reading, writing])
def test_nothing_else_is_read_and_nothing_is_changed(run, tmp_path, kind):
    before = files(tmp_path)
    for query in kind(tmp_path / "run.parquet"):
        with pytest.raises(QueryError):
            pytest.fail(f"{query} gave {run.sql(query).rows}")
    assert files(tmp_path) == before
    assert run.sql("SELECT count(*) FROM records").rows == [(6,)]
    assert run.execute("SELECT count(*) FROM modules").fetchall() == [(0,)]


def test_a_query_that_changes_its_own_copy_changes_nothing(run, tmp_path):
    before = files(tmp_path)
    changing = "WITH x AS (INSERT INTO meta_table VALUES (0, 'k', 'v') RETURNING *) SELECT * FROM x"
    assert run.sql(changing).rows == [(0, "k", "v")]
    assert run.sql("SELECT count(*) FROM meta WHERE key = 'k'").rows == [(0,)]
    assert files(tmp_path) == before


def refusal(run: Run, query: str) -> str:
    with pytest.raises(QueryError) as error:
        _ = run.sql(query).rows
    return str(error.value)


def test_refusals_say_what_is_wrong(run):
    assert refusal(run, "copy records to 'x.csv'") == "only queries are allowed, not COPY"
    assert refusal(run, "-- c\n set threads = 1") == "only queries are allowed, not SET"
    assert refusal(run, "select 1; select 2") == "one query at a time, please: this is 2"
    assert refusal(run, "") == refusal(run, "-- nothing") == "one query at a time, please: this is none"


def test_the_words_of_duckdb_come_through_without_their_prefix(run):
    assert refusal(run, "select nrm from records").startswith(
        'Referenced column "nrm" not found in FROM clause!\nCandidate bindings: '
    )
    assert refusal(run, "selec 1").startswith('syntax error at or near "selec"')
    assert refusal(run, "select * from nope").startswith("Table with name nope does not exist!")


def test_an_error_in_the_middle_of_the_rows_is_a_query_error(run):
    query = "SELECT CASE WHEN seq < 5 THEN '1' ELSE 'x' END::INTEGER FROM records ORDER BY seq"
    assert "Could not convert string 'x' to INT32" in refusal(run, query)


def test_no_setting_opens_what_is_shut(one_run):
    query = (
        "SELECT name, value FROM duckdb_settings() WHERE name IN ('allowed_directories', 'temp_directory', 'threads')"
    )
    settings = dict(one_run.sql(query).rows)
    assert (settings["allowed_directories"], settings["temp_directory"]) == ("[]", "")
    for switch in ("autoinstall_known_extensions", "autoload_known_extensions", "enable_progress_bar"):
        assert one_run.sql(f"SELECT current_setting('{switch}')").rows == [(False,)]
        assert one_run.execute(f"SELECT current_setting('{switch}')").fetchall() == [(False,)]


def test_the_secrets_of_the_user_are_not_read(one_run, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert one_run.sql("SELECT * FROM duckdb_secrets()").rows == []


def test_what_does_not_fit_into_memory_is_not_put_where_the_user_stands(one_run, tmp_path):
    one_run.connection.execute("SET memory_limit = '40MB'; SET threads = 1")  # each thread needs some of its own
    query = "SELECT count(*), max(length(r)) FROM (SELECT range::VARCHAR AS r FROM range(2000000) ORDER BY hash(range))"
    before = sorted(tmp_path.rglob("*"))
    assert one_run.execute(query).fetchall() == [(2_000_000, 7)]
    assert sorted(tmp_path.rglob("*")) == before
    (place,) = one_run.execute("SELECT current_setting('temp_directory')").fetchall()[0]
    assert Path(place).parent == Path(tempfile.gettempdir())
    one_run.close()
    assert not Path(place).exists()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT " + "(" * 100_000 + "1" + ")" * 100_000, "Max expression depth|memory exhausted"),
        ("SELECT " + "[" * 5_000 + "1" + "]" * 5_000, "Max expression depth|memory exhausted"),
        ("SELECT 1" + " " * 1_000_000, "a query has at most 1,000,000 characters; this has 1,000,008"),
        ("SELECT '\udcff'", "the query is not text: what stands at character 8 is none"),
        ("SELECT INTERVAL '1000000000 days'", "a value does not fit into Python: .*; cast it to VARCHAR"),
        ("\uff33\uff25\uff2c\uff25\uff23\uff34 1", "syntax error"),  # SELECT in full-width letters
        ("SELECT $1", "parameters: 1"),
        ("/* SELECT */ EXPORT DATABASE 'x'", "only queries are allowed, not EXPORT"),
        ("SELECT 1; /* */ COPY records TO 'x.csv'", "one query at a time"),
        ("SELECT 1\0; COPY records TO 'x.csv'", "one query at a time|syntax error|unterminated|Invalid"),
        ("EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO 'x.csv') SELECT 1", "disabled|syntax error|A CTE needs"),
    ],
)
def test_odd_queries_are_refused_in_words(one_run, tmp_path, query, said):
    assert re.search(said, refusal(one_run, query))
    assert not (tmp_path / "x.csv").exists()


def test_results_as_rows_arrow_and_pandas(run):
    result = run.sql("SELECT step, max FROM records ORDER BY step LIMIT 2")
    assert result.columns == ["step", "max"]
    assert result.rows == [(0, 0.0), (1, 0.5)]
    assert list(result) == result.rows
    assert result.arrow().to_pydict() == {"step": [0, 1], "max": [0.0, 0.5]}
    assert result.df()["max"].tolist() == [0.0, 0.5]


def test_two_results_can_be_read_in_turns(run):
    one, other = (run.sql("SELECT seq FROM records ORDER BY seq") for _ in range(2))
    assert list(zip(one, other, strict=True)) == [((n,), (n,)) for n in range(6)]


def test_values_keep_their_types(run):
    query = "SELECT 1::HUGEINT, TIMESTAMP '2026-01-02 03:04:05', [1, NULL], 'nan'::DOUBLE, NULL"
    values = run.sql(query).rows[0]
    assert values[:3] == (1, datetime.datetime(2026, 1, 2, 3, 4, 5), [1, None])
    assert values[3] != values[3]
    assert values[4] is None


def test_the_sandbox_sees_the_facts_of_the_run(run):
    assert json.loads(run.sql("SELECT value FROM meta WHERE key = 'world_size'").rows[0][0]) in (1, 2)
