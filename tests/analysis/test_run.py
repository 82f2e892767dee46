"""open_run: every kind of path, every state of a run, and what the views say of literal rows."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from datetime import datetime, timezone
from pathlib import Path

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from traces import write_run

from gradtrace.analysis import ranks
from gradtrace.analysis.run import open_run
from gradtrace.errors import NotARunError, RunNotFoundError
from gradtrace.trace import merging
from gradtrace.trace.arrow import ARROW_SCHEMA, batch_of_records
from gradtrace.trace.runinfo import METADATA_KEY, ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter


def plain_rows(steps: int, rank: int = 0) -> list[Record]:
    return [Record(step, step, "forward", "output", "layer", rank=rank) for step in range(steps)]


def open_writer(path: Path, steps: int, **facts: object) -> RunWriter:
    """Return a writer that has written some steps and goes on."""
    writer = RunWriter(path, RunInfo("test", **facts), rows_per_part=2)  # type: ignore[arg-type]
    for row in plain_rows(steps, writer_rank := int(facts.get("rank", 0))):  # type: ignore[call-overload]
        assert row.rank == writer_rank
        writer.write(batch_of_records([row]))
    return writer


def steps_in(path: Path | str) -> list[tuple[int, int]]:
    with open_run(path) as run:
        return run.execute("SELECT rank, step FROM records ORDER BY ALL").fetchall()


def test_a_finished_file(tmp_path):
    path = write_run(tmp_path / "run.parquet", plain_rows(3), command=["train.py"])
    with open_run(path) as run:
        assert (run.end, run.missing, run.steps) == ("completed", [], 3)
        assert run.info.command == ["train.py"]
        assert run.infos == [run.info]
        assert run.path == str(path)
    assert steps_in(path) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("name", ["run.parquet", "run.parquet.parts", "run*", "*.parts"])
def test_a_run_that_is_being_recorded_by_any_of_its_names(tmp_path, name):
    writer = open_writer(tmp_path / "run.parquet", 5)
    with open_run(tmp_path / name) as run:
        assert run.end == "running"
        assert run.missing == ["the run is still being recorded; this is what there is up to step 4"]
        assert (run.steps, run.info.last_step, run.info.records) == (5, 4, 5)
    assert steps_in(tmp_path / name) == [(0, step) for step in range(5)]
    writer.finish(RunInfo("test", end="completed"))


def test_a_run_opened_while_recording_stays_what_it_was_when_the_writer_goes_on_and_finishes(tmp_path):
    writer = open_writer(tmp_path / "run.parquet", 5)
    with open_run(tmp_path / "run.parquet") as run:
        writer.write(batch_of_records([Record(5, 5, "forward", "output", "layer")]))
        writer.finish(RunInfo("test", end="completed"))
        assert not (tmp_path / "run.parquet.parts").exists()
        assert run.execute("SELECT step FROM records ORDER BY 1").fetchall() == [(n,) for n in range(5)]
        assert run.sql("SELECT step FROM records ORDER BY 1").rows == [(n,) for n in range(5)]
    assert len(steps_in(tmp_path / "run.parquet")) == 6


RECORDER = """
    import sys
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.schema import Record
    from gradtrace.trace.writer import RunWriter

    print("ready", flush=True)
    for number in range(3):
        writer = RunWriter(sys.argv[1] + f"/{number}.parquet", RunInfo("test"), rows_per_part=3)
        for step in range(100):
            writer.write(batch_of_records([Record(step, step, "forward", "output", "layer")]))
        writer.finish(RunInfo("test", end="completed"))
"""


def test_reading_all_the_time_while_another_process_records_sees_whole_steps_and_disturbs_nothing(tmp_path):
    recorder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RECORDER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert recorder.stdout is not None
    assert recorder.stdout.readline() == "ready\n"
    looks = 0
    for number in range(3):
        path = tmp_path / f"{number}.parquet"
        before, end = 0, ""
        while end != "completed":
            try:
                with open_run(path) as run:
                    steps = run.execute("SELECT step FROM records ORDER BY seq").fetchall()
                    end = run.end
            except RunNotFoundError:
                assert before == 0
                continue
            assert steps == [(step,) for step in range(len(steps))]
            assert len(steps) >= before
            before = len(steps)
            looks += 1
        assert before == 100
    assert recorder.wait() == 0
    recorder.stdout.close()
    assert looks >= 3


def test_several_ranks_are_one_run(tmp_path):
    for rank in (1, 0):
        path = write_run(tmp_path / "run", plain_rows(2, rank), rank=rank, world_size=2)
    with open_run(path) as run:
        assert [info.rank for info in run.infos] == [0, 1]
        assert run.missing == []
    assert steps_in(path) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert steps_in(f"{path}/*.parquet") == steps_in(path)
    assert steps_in(path / "rank-1.parquet") == [(1, 0), (1, 1)]


def test_of_several_ranks_one_may_still_be_recording_and_another_missing(tmp_path):
    path = write_run(tmp_path / "run", plain_rows(2, 0), rank=0, world_size=3)
    writer = open_writer(path, 3, rank=2, world_size=3)
    with open_run(path) as run:
        assert run.end == "running"
        assert run.missing == [
            "rank 1 of 3 has no file",
            "rank 2: the run is still being recorded; this is what there is up to step 2",
        ]
    assert steps_in(path) == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    writer.finish(RunInfo("test", rank=2, world_size=3, end="completed"))


def test_of_several_attempts_the_latest_is_read_and_the_others_are_named(tmp_path):
    path = write_run(tmp_path / "run", plain_rows(5, 0), rank=0, world_size=2)
    write_run(tmp_path / "run", plain_rows(5, 1), rank=1, world_size=2)
    for rank in (0, 1):
        write_run(tmp_path / "run", plain_rows(1, rank), rank=rank, world_size=2, attempt=1)
    assert steps_in(path) == [(0, 0), (1, 0)]
    with open_run(path) as run:
        assert run.missing == ["earlier attempts are left out: rank-0.parquet, rank-1.parquet"]


def test_an_attempt_that_died_before_it_recorded_anything_is_passed_over(tmp_path):
    path = write_run(tmp_path / "run", plain_rows(5, 0), rank=0, world_size=2)
    write_run(tmp_path / "run", plain_rows(5, 1), rank=1, world_size=2)
    write_run(tmp_path / "run", [], rank=0, world_size=2, attempt=1)
    unfinished = open_writer(tmp_path / "run", 0, rank=1, world_size=2, attempt=1)
    with open_run(path) as run:
        assert run.missing == ["attempts after 0 recorded nothing and are left out; the last one was attempt 1"]
        assert run.steps == 5
    unfinished.finish(RunInfo("test", rank=1, world_size=2, attempt=1))


def test_two_runs_at_once_are_refused_by_name(tmp_path):
    write_run(tmp_path / "a.parquet", plain_rows(1), run_id="a")
    write_run(tmp_path / "b.parquet", plain_rows(1), run_id="b")
    with pytest.raises(NotARunError, match=r"holds several runs; name one of them: a.parquet, b.parquet"):
        open_run(tmp_path / "*.parquet")


def test_a_name_with_glob_characters_means_itself(tmp_path):
    path = write_run(tmp_path / "lr[1e-3]'*.parquet", plain_rows(2))
    write_run(tmp_path / "lr1'x.parquet", plain_rows(4))
    assert len(steps_in(path)) == 2
    with open_run(path) as run:
        assert run.sql("SELECT count(*) FROM records").rows == [(2,)]


def test_nothing_there(tmp_path):
    with pytest.raises(RunNotFoundError) as error:
        open_run(tmp_path / "nope.parquet")
    assert str(error.value) == f"no such file: {tmp_path / 'nope.parquet'}"


def test_a_glob_that_matches_nothing_names_what_there_is(tmp_path):
    write_run(tmp_path / "first.parquet", plain_rows(1))
    open_writer(tmp_path / "second.parquet", 1).close_parts(RunInfo("test", end="signal SIGTERM"))
    with pytest.raises(RunNotFoundError) as error:
        open_run(tmp_path / "x*.parquet")
    assert str(error.value) == (
        f"no file matches {tmp_path / 'x*.parquet'}; there are: first.parquet, second.parquet.parts"
    )


def test_a_file_that_goes_away_before_it_is_read_is_missing_and_not_malformed(tmp_path, monkeypatch):
    gone = tmp_path / "gone.parquet"
    monkeypatch.setattr(ranks, "locate", lambda text: [gone])
    monkeypatch.setattr(ranks, "_PAUSE", 0)
    with pytest.raises(NotARunError) as error:
        open_run(gone)
    assert str(error.value) == f"{gone} is no whole run: {gone} is missing"


def test_a_parquet_file_of_something_else(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(NotARunError) as error:
        open_run(tmp_path / "x.parquet")
    assert str(error.value) == f"{tmp_path / 'x.parquet'} is a Parquet file, but not a gradtrace run"


def test_a_newer_schema_names_both_versions(tmp_path):
    newer = RunInfo("r", schema_version=99).to_json()
    table = pa.Table.from_batches([], ARROW_SCHEMA.with_metadata({METADATA_KEY: newer}))
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(NotARunError, match=r"x.parquet has schema version 99; this gradtrace reads up to 1"):
        open_run(tmp_path / "x.parquet")


def test_a_directory_without_a_run(tmp_path):
    with pytest.raises(NotARunError) as error:
        open_run(tmp_path)
    assert str(error.value) == f"{tmp_path} is a directory without a run in it"


def test_parts_without_their_facts(tmp_path):
    (tmp_path / "run.parquet.parts").mkdir()
    with pytest.raises(NotARunError, match=r"is no whole run: .*run.json is missing"):
        open_run(tmp_path / "run.parquet")


def test_a_run_of_another_machine_is_taken_as_killed_and_says_so(tmp_path):
    writer = open_writer(tmp_path / "run.parquet", 1)
    shutil.copytree(tmp_path / "run.parquet.parts", tmp_path / "copy.parquet.parts")
    writer.finish(RunInfo("test", end="completed"))
    facts = tmp_path / "copy.parquet.parts" / "run.json"
    host = os.uname().nodename
    facts.write_text(facts.read_text().replace(f'"host": "{host}"', '"host": "elsewhere"'))
    with open_run(tmp_path / "copy.parquet") as run:
        assert run.end == "killed"
        assert run.missing == [
            "the run may still go on, on elsewhere; taken as killed",
            "the step after 0 was in flight when the run was killed",
        ]


def test_boundaries_that_were_not_measured_and_a_tracer_that_failed_are_missing(tmp_path):
    path = write_run(tmp_path / "run.parquet", plain_rows(2), end="tracer failed: oops", unmeasured={"sparse": 3})
    with open_run(path) as run:
        assert run.end == "tracer failed: oops"
        assert run.missing == [
            "recording stopped after step 1: oops; the training went on",
            "3 boundaries were seen and not recorded: sparse",
        ]


def test_a_run_killed_before_its_first_step(tmp_path):
    writer = open_writer(tmp_path / "run.parquet", 0)
    facts = tmp_path / "run.parquet.parts" / "run.json"
    values = json.loads(facts.read_text())
    values["process"]["started"] += 1  # another process of that number
    facts.write_text(json.dumps(values))
    with open_run(tmp_path / "run.parquet") as run:
        assert run.missing == ["the run was killed before a step was recorded"]
        assert run.execute("FROM steps").fetchall() == []
    writer.finish(RunInfo("test", end="completed"))


TIME = datetime(2026, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
ROWS = [
    Record(0, 0, "optimizer", "lr", path="0.0", min=0.1, max=0.1, norm=0.1, time=TIME),
    Record(0, 1, "optimizer", "lr", path="0.1", min=0.2, max=0.2, norm=0.2, time=TIME),
    Record(0, 2, "loss", "loss", max=5.0, nan_count=0, posinf_count=0, neginf_count=0, time=TIME),
    Record(0, 3, "backward", "grad", "a", "weight", norm=100.0, time=TIME),
    Record(0, 4, "loss", "loss", micro_step=1, max=4.0, nan_count=0, time=TIME),
    Record(0, 5, "backward", "grad", "a", "weight", micro_step=1, norm=3.0, time=TIME),
    Record(0, 6, "backward", "grad", "a", "bias", micro_step=1, norm=4.0, nan_count=1, time=TIME),
    Record(0, 7, "optimizer", "loss_scale", path="0", min=65536.0, max=65536.0, time=TIME),
    Record(0, 8, "optimizer", "param", "a", "weight", posinf_count=1, neginf_count=2, time=TIME),
    Record(1, 9, "loss", "loss", nan_count=1, time=TIME),
    Record(1, 10, "event", "skip", detail="GradScaler", time=TIME),
    Record(2, 11, "loss", "loss", neginf_count=1, time=TIME),
    Record(3, 12, "loss", "loss", posinf_count=1, time=TIME),
    Record(4, 13, "forward", "output", "a", time=TIME),
]
MODULES = [
    ModuleInfo("", "Net", root=True, file="net.py", line=3, calls=4),
    ModuleInfo("a", "Linear", depth=1, parameters={"weight": "[8, 4]", "bias": "[8]", "scale": "[]"}),
]


@pytest.fixture(scope="module", params=["finished", "parts"])
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("views") / "run.parquet"
    if request.param == "finished":
        write_run(path, ROWS, modules=MODULES, versions={"torch": "2.13"})
    else:
        writer = RunWriter(path, RunInfo("test", modules=MODULES, versions={"torch": "2.13"}), rows_per_part=9)
        for row in ROWS:
            writer.write(batch_of_records([row]))
        writer.close_parts(RunInfo("test", modules=MODULES, versions={"torch": "2.13"}, end="completed"))
    with open_run(path) as opened:
        yield opened


def both(run, query):
    """Ask the library's connection and the sandbox; they must agree."""
    rows = run.execute(query).fetchall()
    assert repr(run.sql(query).rows) == repr(rows)
    return rows


def test_records_come_back_as_they_were_written(run):
    rows = both(run, "SELECT * FROM records ORDER BY seq")
    names = run.sql("FROM records").columns
    assert names == ARROW_SCHEMA.names
    expected = [row._replace(time=TIME.replace(tzinfo=None)) for row in ROWS]
    assert [Record(**dict(zip(names, row, strict=True))) for row in rows] == expected


def test_the_steps_view(run):
    rows = both(run, "SELECT * EXCLUDE (time) FROM steps ORDER BY step")
    assert repr(rows) == repr(
        [
            (0, 0, "full", 2, 9, 1, 1, 1, 4.0, math.nan, 0.1, 65536.0, False),
            (0, 1, "watched", 1, 1, 1, 0, 0, math.nan, None, None, None, True),
            (0, 2, "watched", 1, 1, 0, 0, 1, -math.inf, None, None, None, False),
            (0, 3, "watched", 1, 1, 0, 1, 0, math.inf, None, None, None, False),
            (0, 4, "watched", 1, 1, 0, 0, 0, None, None, None, None, False),
        ]
    )
    assert both(run, "SELECT DISTINCT time FROM steps") == [(TIME.replace(tzinfo=None),)]
    assert run.sql("FROM steps").columns == [
        "rank",
        "step",
        "time",
        "level",
        "micro_steps",
        "records",
        "nan_records",
        "posinf_records",
        "neginf_records",
        "loss",
        "grad_norm",
        "lr",
        "loss_scale",
        "skipped",
    ]


def test_a_watched_step_has_the_last_norm_of_its_gradients(tmp_path):
    scalar = {"shape": "[]", "numel": 1, "nan_count": 0, "posinf_count": 0, "neginf_count": 0}
    rows = [
        Record(0, 0, "input", "input", ""),
        Record(0, 1, "backward", "grad", "a", "weight", norm=3.0, nan_count=0),
        Record(0, 2, "backward", "grad", "a", "bias", norm=4.0, nan_count=0),
        Record(1, 3, "loss", "loss", max=2.0, nan_count=0),
        Record(1, 4, "backward", "grad_norm", min=6.0, max=6.0, norm=6.0, **scalar),
        Record(1, 5, "backward", "grad_norm", micro_step=1, min=7.0, max=7.0, norm=7.0, **scalar),
        Record(2, 6, "backward", "grad", "a", "bias", nan_count=1),
        Record(2, 7, "backward", "grad_norm", **(scalar | {"nan_count": 1})),
        Record(3, 8, "backward", "grad_norm", **(scalar | {"posinf_count": 1})),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as opened:
        found = opened.sql("SELECT step, level, loss, grad_norm FROM steps").rows
        assert repr(found) == repr(
            [
                (0, "full", None, 5.0),
                (1, "watched", 2.0, 7.0),
                (2, "watched", None, math.nan),
                (3, "watched", None, math.inf),
            ]
        )
        assert (opened.steps, opened.captured) == (4, 1)
        assert opened.sql("SELECT count(*) FROM grads").rows == [(3,)]


def test_a_run_without_watched_steps_was_captured_in_full(tmp_path):
    with open_run(write_run(tmp_path / "run.parquet", ROWS)) as opened:
        assert (opened.steps, opened.captured) == (5, 5)


def test_a_thinned_run_says_what_is_missing(tmp_path):
    thinned = {"first_step": 3, "last_step": 90, "every": 4}
    with open_run(write_run(tmp_path / "run.parquet", ROWS, thinned=thinned)) as opened:
        assert opened.missing == ["steps 3 to 90 were thinned to save space: one in 4 is in full, or near incidents"]


def test_params_grads_and_events(run):
    assert both(run, "SELECT seq FROM params") == [(8,)]
    assert both(run, "SELECT seq FROM grads ORDER BY seq") == [(3,), (5,), (6,)]
    assert both(run, "SELECT step, seq, event, module, detail FROM events") == [(1, 10, "skip", None, "GradScaler")]


def test_the_modules_view(run):
    shapes = {"weight": "[8, 4]", "bias": "[8]", "scale": "[]"}
    assert both(run, "SELECT * FROM modules ORDER BY number") == [
        ("", 0, "Net", True, 0, "net.py", 3, 0, {}, 4),
        ("a", 1, "Linear", False, 1, None, None, 8 * 4 + 8 + 1, shapes, 0),
    ]
    assert both(run, "SELECT type FROM records JOIN modules USING (module) WHERE seq = 13") == [("Linear",)]


def test_the_meta_view(run):
    rows = dict(both(run, "SELECT key, value FROM meta"))
    assert rows["run_id"] == "test"
    assert rows["versions"] == '{"torch": "2.13"}'
    assert rows["end"] == "completed"
    assert "modules" not in rows


def test_the_first_bad_record_is_found_without_reading_the_healthy_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "ROWS_PER_GROUP", 100)
    rows = [Record(n // 10, n, "forward", "output", "layer", nan_count=int(n == 5555), max=1.0) for n in range(6000)]
    path = write_run(tmp_path / "run.parquet", rows)
    metadata = pq.read_metadata(path)
    column = metadata.schema.names.index("nan_count")
    groups = [metadata.row_group(n).column(column).statistics for n in range(metadata.num_row_groups)]
    assert [n for n, statistics in enumerate(groups) if statistics.max > 0] == [55]
    with open_run(path) as run:
        query = "SELECT seq FROM records WHERE nan_count > 0 ORDER BY seq LIMIT 1"
        assert run.execute(query).fetchall() == [(5555,)]
        plan = run.execute(f"EXPLAIN ANALYZE {query}").fetchall()[0][1]
    assert "nan_count>0" in plan.replace(" ", "")


def test_the_file_reads_the_same_in_pandas_polars_and_plain_duckdb(tmp_path):
    path = write_run(tmp_path / "run.parquet", ROWS, modules=MODULES)
    frames = {
        "pandas": pandas.read_parquet(path).astype(object),
        "polars": polars.read_parquet(path).to_pandas().astype(object),
        "duckdb": duckdb.sql(f"FROM '{path}'").df().astype(object),
    }
    for name, frame in frames.items():
        assert list(frame.columns) == ARROW_SCHEMA.names, name
        assert frame["seq"].tolist() == [row.seq for row in ROWS], name
        assert frame["tensor"].tolist() == [row.tensor for row in ROWS], name
        modules = [None if pandas.isna(module) else module for module in frame["module"]]
        assert modules == [row.module for row in ROWS], name
        norms = [None if pandas.isna(norm) else norm for norm in frame["norm"]]
        assert norms == [row.norm for row in ROWS], name
        assert frame["time"][0] == pandas.Timestamp(TIME), name


def open_parts(directory: Path) -> int:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(f"{directory}/") for link in links if os.path.lexists(link))


def test_closing_lets_go_of_the_files(tmp_path):
    writer = open_writer(tmp_path / "run.parquet", 7)
    while len(list(tmp_path.glob("*.parts/part-*.parquet"))) < 3:
        time.sleep(0.01)
    before = open_parts(tmp_path)  # the writer's journal
    run = open_run(tmp_path / "run.parquet")
    assert open_parts(tmp_path) == before + 3
    run.close()
    run.close()
    assert open_parts(tmp_path) == before
    writer.finish(RunInfo("test", end="completed"))


def test_reading_a_finished_file_imports_nothing_that_is_slow_to_import(tmp_path):
    path = write_run(tmp_path / "run.parquet", ROWS, modules=MODULES)
    code = f"""
        import sys
        from gradtrace import open_run
        from gradtrace.analysis import catalog, summary, verdict
        with open_run({str(path)!r}) as run:
            run.execute("FROM steps").fetchall()
            assert verdict.first_nan(run).found
            summary.by_module(run), summary.by_step(run), catalog.describe(run)
        slow = ("torch", "numpy", "pyarrow", "pandas", "rich", "gradtrace.capture")
        print([name for name in slow if name in sys.modules])
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("[]\n", "")


def test_the_gradient_norm_of_a_step_with_a_bad_gradient_is_not_finite(tmp_path):
    kept = {"phase": "backward", "tensor": "grad", "module": "fc", "numel": 4, "neginf_count": 0}
    path = tmp_path / "run.parquet"
    write_run(
        path,
        [
            Record(step=0, seq=0, path="weight", nan_count=0, posinf_count=0, norm=3.0, **kept),
            Record(step=0, seq=1, path="bias", nan_count=0, posinf_count=0, norm=4.0, **kept),
            Record(step=1, seq=2, path="weight", nan_count=0, posinf_count=0, norm=3.0, **kept),
            Record(step=1, seq=3, path="bias", nan_count=4, posinf_count=0, norm=None, **kept),
            Record(step=2, seq=4, path="weight", nan_count=0, posinf_count=1, norm=3.0, **kept),
        ],
    )
    with open_run(path) as opened:
        norms = [row[0] for row in opened.sql("SELECT grad_norm FROM steps ORDER BY step").rows]
    assert repr(norms) == "[5.0, nan, inf]"


def test_an_evaluation_is_no_micro_step(tmp_path):
    path = tmp_path / "run.parquet"
    rows = [
        Record(step=0, seq=0, phase="forward", tensor="output", module="", micro_step=0),
        Record(step=0, seq=1, phase="forward", tensor="output", module="", micro_step=1),
        Record(step=0, seq=2, phase="evaluation", tensor="output", module="", micro_step=2),
        Record(step=1, seq=3, phase="evaluation", tensor="output", module="", micro_step=0),
    ]
    write_run(path, rows)
    with open_run(path) as opened:
        assert opened.sql("SELECT micro_steps FROM steps ORDER BY step").rows == [(2,), (1,)]
