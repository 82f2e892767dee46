"""``gradtrace.open_run`` and what it gives: the right values in Python and in a notebook, and no needless imports."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import duckdb
import pytest

import gradtrace
from gradtrace.analysis.tabular import SHOWN
from gradtrace.analysis.verdict_model import Fate
from gradtrace.errors import GradtraceError, MissingPackageError, NoMatchError, QueryError, RunClosedError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter
from tests.analysis.rows import ALL_NAN, MODULES, NAN, PARAMS, Rows, backward, forward, healthy, open_rows, update
from tests.traces import write_run

GOLDEN = Path(__file__).parent.parent / "cli" / "golden"
HOSTILE = """<script>alert("x")</script>'&amp;"""
ESCAPED = "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&#x27;&amp;amp;"


def _backward_failure() -> Rows:
    """Two healthy steps, one in whose backward pass act makes a NaN, one that starts with lost weights."""
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, 2)
    forward(rows)
    backward(rows, act_in=NAN, fc1=NAN, fc1_grad=NAN)
    update(rows, fc1=NAN)
    rows.step += 1
    forward(rows, fc1=ALL_NAN, act_in=ALL_NAN, act=ALL_NAN, fc2_in=ALL_NAN, fc2=ALL_NAN, out=ALL_NAN)
    rows.scalar("loss", "loss", None, **NAN)
    return rows


@pytest.fixture
def failed(tmp_path):
    with open_rows(tmp_path, _backward_failure(), command=["train.py", "--lr", "3e-4"]) as run:
        yield run


def test_a_verdict_prints_as_the_command_line_does(failed):
    expected = (GOLDEN / "first_nan_backward.txt").read_text(encoding="utf-8")
    verdict = failed.first_nan(context=2)
    assert str(verdict) + "\n" == expected
    assert repr(verdict) == str(verdict)


def test_a_verdict_is_the_table_of_what_led_to_it(failed):
    frame = failed.first_nan(context=2).df()
    # seq: 2 parameters, 20 rows a healthy step, 8 of the forward pass, loss, out, fc2, fc2_in; then these three
    assert frame["seq"].tolist() == [54, 55, 56]
    assert frame[["module", "tensor", "path"]].values.tolist() == [
        ["fc2", "grad", "weight"],
        ["act", "grad_output", "0"],
        ["act", "grad_input", "0"],
    ]
    assert frame["nan_count"].tolist() == [0, 0, 1]
    assert frame["max"].tolist() == [55.0, 56.0, 57.0]
    assert frame["fate"].tolist()[-1] == "made"
    assert frame["fate"].isna().tolist() == [True, True, False]


def test_the_types_of_a_verdicts_table_are_those_of_the_recording(failed, tmp_path):
    table = failed.first_nan().arrow()
    assert table.column_names[:5] == ["step", "micro_step", "rank", "seq", "phase"]
    assert {name: str(table.schema.field(name).type) for name in ("step", "rank", "module", "norm", "fate")} == {
        "step": "int64",
        "rank": "int32",
        "module": "string",
        "norm": "double",
        "fate": "string",
    }
    rows = Rows()
    healthy(rows, 1)
    with open_rows(tmp_path / "healthy", rows) as run:
        verdict = run.first_nan()
        assert verdict.arrow().schema == table.schema
        assert (verdict.found, verdict.rows, len(verdict.df())) == (False, [], 0)
        assert str(verdict) == "No NaN or Inf that matters in 1 step of 4 modules (20 records)."


def test_what_a_run_started_with_comes_before_where_it_was_used(tmp_path):
    rows = Rows()
    start = rows.add("input", "fc1", "param", "weight", **NAN)
    forward(rows, fc1=NAN, act_in=NAN, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    backward(rows, None, NAN)
    with open_rows(tmp_path, rows) as run:
        verdict = run.first_nan(context=0)
    assert verdict.finding.row.seq == start.seq
    assert [(row.module, row.tensor) for row in verdict.trail] == [("fc1", "param"), ("fc1", "output")]
    assert [row[-1] for row in verdict.rows] == [Fate.MADE.value, Fate.PASSED_ON.value]


def test_a_verdict_in_a_notebook_has_the_same_words_and_numbers(failed):
    html = failed.first_nan()._repr_html_()
    first, rest = html.split("</p>", 1)
    assert first.startswith('<div><p style="')
    assert "font-weight:bold" in first
    assert first.endswith("First non-finite value: step 2, backward, act (ReLU), grad_input 0: 1 nan of 8")
    assert rest.count("<table>") == 2
    for words in (
        "made by    the backward of act",
        "What led to it, oldest first",
        "The same boundary in earlier steps",
    ):
        assert words in rest
    assert rest.index("What led to it") < rest.index(">made</td>") < rest.index("The same boundary")
    assert "Usual mend: " in rest.rpartition("</table>")[2]


def test_a_verdict_in_a_notebook_with_nothing_wrong_is_not_loud(tmp_path):
    rows = Rows()
    healthy(rows, 1)
    with open_rows(tmp_path, rows) as run:
        html = run.first_nan()._repr_html_()
    assert html == "<div><p>No NaN or Inf that matters in 1 step of 4 modules (20 records).</p></div>"


def test_a_verdict_says_what_the_recording_lacks(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("test", modules=MODULES))
    for record in _backward_failure().records:
        writer.write(batch_of_records([record]))
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        verdict = run.first_nan()
        note = "note: the run is still being recorded; this is what there is up to step 3"
        assert str(verdict).splitlines()[-1] == note
        assert f"{note}</pre></div>" in verdict._repr_html_()
        assert note in run._repr_html_()
    writer.finish(RunInfo("test", end="completed"))


def _summary_run(path: Path) -> gradtrace.Run:
    modules = [ModuleInfo("", "Net", root=True, calls=2), ModuleInfo("a", "Linear", depth=1, calls=2)]
    modules += [ModuleInfo("a.0", "Linear", depth=2, parameters={"weight": "[3, 2]"}, calls=2)]
    rows = []
    for step in range(2):
        output = Record(step, 4 * step, "forward", "output", "a", norm=2.0 + step, min=-3.0, max=1.0)
        grad = Record(step, 4 * step + 1, "backward", "grad", "a.0", "weight", norm=0.5, min=0.0, max=0.25)
        bad = grad._replace(norm=None, min=None, max=None, nan_count=6)
        rows += [output, bad if step else grad]
    return gradtrace.open_run(write_run(path / "run.parquet", rows, modules=modules))


def test_a_summary_by_module_is_a_table(tmp_path):
    with _summary_run(tmp_path) as run:
        found = run.summary()
        folded = run.summary(depth=1)
    assert found.by == "module"
    frame = found.df()
    assert frame["module"].tolist() == ["", "a", "a.0"]
    assert frame["parameters"].tolist() == [0, 0, 6]
    assert frame["max_output"].tolist()[1] == 3.0
    assert frame["nan"].tolist() == [0, 0, 1]
    assert str(frame["max_param"].dtype) == "float64"  # of which there is none
    assert repr(found.arrow()["grad_norms"].to_pylist()) == "[[None, None], [None, None], [0.5, nan]]"
    assert [line.name for line in folded.lines] == ["", "a"]
    assert repr(folded.lines[1].grad_norms) == "[0.5, nan]"


def test_a_summary_by_type_and_by_step(tmp_path):
    with _summary_run(tmp_path) as run:
        types = run.summary(by="type")
        steps = run.summary(by="step")
    assert types.columns[:2] == ("type", "parameters")
    assert [row[:3] for row in types.rows] == [("Net", 0, 2), ("Linear", 6, 4)]
    frame = steps.df()
    assert frame["step"].tolist() == [0, 1]
    assert repr(frame["grad_norm"].tolist()) == "[0.5, nan]"
    assert frame["skipped"].tolist() == [False, False]
    assert str(steps.arrow().schema.field("lr").type) == "double"  # of which there is none


def test_a_summary_for_people_names_the_root_and_draws_its_series(tmp_path):
    with _summary_run(tmp_path) as run:
        found = run.summary()
    lines = str(found).splitlines()
    assert lines[2].split()[:2] == ["(root)", "Net"]
    assert lines[4].split()[:6] == ["a.0", "Linear", "6", "2", "2", "▁!"]
    assert ">(root)</td>" in found._repr_html_()
    assert ">▁!</td>" in found._repr_html_()


def test_a_query_shows_its_first_rows_and_still_has_all_of_them(tmp_path):
    rows = [Record(step, step, "loss", "loss", max=float(step)) for step in range(SHOWN + 5)]
    with gradtrace.open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        result = run.sql("SELECT step, max FROM records ORDER BY seq")
        html = result._repr_html_()
        assert html.count("<tr>") == SHOWN + 1
        assert html.endswith("<p>more rows</p>")
        assert str(result).splitlines()[-1] == "more rows"
        assert result.rows == [(step, float(step)) for step in range(SHOWN + 5)]
        assert str(result).splitlines()[-1] == "5 more rows"
        assert list(result) == result.rows


def test_showing_a_query_fetches_no_more_than_is_shown(tmp_path):
    with gradtrace.open_run(write_run(tmp_path / "run.parquet", [Record(0, 0, "loss", "loss")])) as run:
        endless = run.sql("SELECT range AS n FROM range(1000000000000)")  # all of it would take days
        assert "<p>more rows</p>" in endless._repr_html_()
        assert str(endless).splitlines()[2:4] == [" 0", " 1"]


def test_a_query_with_few_rows_is_asked_once(tmp_path):
    with gradtrace.open_run(write_run(tmp_path / "run.parquet", [Record(0, 0, "loss", "loss")])) as run:
        drawn = run.sql("SELECT random() AS x, NULL AS nothing")
        html = drawn._repr_html_()
        assert drawn.rows == drawn.rows
        assert f">{drawn.rows[0][0]:.6g}</td>" in html
        assert ">-</td>" in html


def test_a_data_frame_takes_the_rows_of_the_query_that_is_running():
    made = []

    def connect():
        made.append(duckdb.connect())
        return made[-1]

    result = gradtrace.Result(connect, "SELECT 7 AS n")
    assert result.df()["n"].tolist() == [7]
    assert len(made) == 1
    with pytest.raises(duckdb.ConnectionException):  # closed with the last row
        made[0].execute("SELECT 1")
    assert result.df()["n"].tolist() == result.arrow()["n"].to_pylist() == [7]


def test_a_query_as_a_data_frame_and_as_an_arrow_table(failed):
    result = failed.sql("SELECT step, max(norm) AS norm FROM records WHERE tensor = 'loss' GROUP BY step ORDER BY step")
    frame = result.df()
    assert frame["step"].tolist() == [0, 1, 2, 3]
    assert frame["norm"].tolist()[:3] == [1.0, 1.0, 1.0]
    assert math.isnan(frame["norm"].tolist()[3])
    assert result.arrow().to_pydict() == {"step": [0, 1, 2, 3], "norm": [1.0, 1.0, 1.0, None]}


def test_a_checkup_of_a_loss_scale_that_goes_below_one(tmp_path):
    rows = Rows()
    for scale in (2.0, 1.0, 0.5):
        forward(rows)
        backward(rows)
        update(rows)
        rows.scalar("optimizer", "loss_scale", scale, "0")
        rows.step += 1
    with open_rows(tmp_path, rows) as run:
        checkup = run.check(rules=["loss-scale-collapse"])
    frame = checkup.df()
    assert frame[["rule", "tensor", "step", "value", "threshold"]].values.tolist() == [
        ["loss-scale-collapse", "loss_scale", 2, 0.5, 1.0]
    ]
    assert frame["module"].isna().tolist() == [True]


def test_a_difference_between_two_runs_is_where_one_of_them_differs(tmp_path):
    one, other = Rows(), Rows()
    for rows in (one, other):
        healthy(rows, 1)
        forward(rows, act={"max": 99.0, "norm": 100.0} if rows is other else {})
        backward(rows)
        update(rows)
    with open_rows(tmp_path / "one", one) as run, open_rows(tmp_path / "other", other) as changed:
        difference = run.diff(changed)
        by_path = run.diff(tmp_path / "other" / "run.parquet")
    frame = difference.df()
    assert frame[["module", "differing", "first_step", "first_phase", "first_tensor"]].values.tolist() == [
        ["act", 1, 1, "forward", "output"]
    ]
    assert by_path.rows == difference.rows


def test_without_pandas_every_answer_says_what_to_install(failed, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for answer in (failed.first_nan(), failed.summary(), failed.sql("SELECT 1")):
        with pytest.raises(MissingPackageError, match=r"^a DataFrame needs pandas: pip install pandas$"):
            answer.df()
        assert answer.arrow().num_rows > 0


def test_a_run_says_what_it_is(failed, tmp_path):
    path = str(tmp_path / "run.parquet")
    assert repr(failed) == f"<Run {path!r}: 4 steps, completed>"
    assert failed._repr_html_() == (
        f"<p><b>{path}</b><br><code>train.py --lr 3e-4</code><br>4 steps, 4 modules, 71 records, completed</p>"
    )


def test_a_run_of_several_ranks_says_how_many(tmp_path):
    for rank in range(2):
        rows = [Record(0, 0, "loss", "loss", rank=rank, max=1.0)]
        write_run(tmp_path / "run.parquet", rows, rank=rank, world_size=2)
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        assert repr(run) == f"<Run {str(tmp_path / 'run.parquet')!r}: 1 step, 2 ranks, completed>"


def test_no_name_in_a_recording_can_break_out_of_a_notebook(tmp_path):
    modules = [ModuleInfo("", "Net", root=True), ModuleInfo(HOSTILE, HOSTILE, depth=1, file=HOSTILE, line=1)]
    rows = Rows()
    rows.add("input", "", "input", HOSTILE)
    rows.add("forward", HOSTILE, "input", HOSTILE)
    rows.add("forward", HOSTILE, "output", HOSTILE, dtype=HOSTILE, **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    with open_rows(tmp_path, rows, modules=modules, command=[HOSTILE]) as run:
        table = run.sql("SELECT module, path, dtype FROM records")
        shown = [run, run.first_nan(), run.summary(), run.diff(run), table]
        shown = [answer._repr_html_() for answer in shown]
    for html in shown:
        assert ESCAPED in html
        assert "<script" not in html and HOSTILE not in html
        assert "color:" not in html and "background" not in html  # either page, light or dark, has its own


def test_what_is_asked_wrongly_is_an_error_of_one_line(failed):
    wrong = {
        "no incident 7": (NoMatchError, lambda: failed.first_nan(incident=7)),
        "there is no summary by 'modules'; there are: module, type, step": (
            NoMatchError,
            lambda: failed.summary(by="modules"),
        ),
        "a depth is a number of levels": (NoMatchError, lambda: failed.summary(by="step", depth=1)),
        "a depth is a number of levels, from 0": (NoMatchError, lambda: failed.summary(depth=-1)),
        "only queries are allowed, not DROP": (QueryError, lambda: failed.sql("DROP VIEW records")),
    }
    for words, (kind, ask) in wrong.items():
        with pytest.raises(kind) as caught:
            ask()
        assert words in str(caught.value)
        assert isinstance(caught.value, GradtraceError) and "\n" not in str(caught.value)


def test_a_closed_run_says_so(failed):
    failed.close()
    for ask in (failed.first_nan, failed.summary, failed._repr_html_, lambda: failed.sql("SELECT 1")):
        with pytest.raises(RunClosedError, match=r"run\.parquet is closed; open it again with gradtrace\.open_run$"):
            ask()
    assert repr(failed).endswith("4 steps, completed>")


def test_the_names_of_the_answers_are_public(failed):
    assert isinstance(failed.first_nan(), gradtrace.Verdict)
    assert isinstance(failed.summary(), gradtrace.Summary)
    assert isinstance(failed.sql("SELECT 1"), gradtrace.Result)
    assert isinstance(failed.check(), gradtrace.Checkup)
    assert isinstance(failed.diff(failed), gradtrace.Difference)
    assert isinstance(failed, gradtrace.Run)


def test_asking_a_finished_file_imports_neither_torch_nor_pandas_nor_pyarrow(tmp_path):
    path = write_run(tmp_path / "run.parquet", _backward_failure().records, modules=MODULES)
    code = f"""
        import json, sys
        import gradtrace
        with gradtrace.open_run({str(path)!r}) as run:
            shown = [repr(run), run._repr_html_()]
            for answer in (run.first_nan(), run.summary(), run.summary(by="step"), run.check(), run.diff(run)):
                shown += [str(answer), answer._repr_html_()]
            before = sorted(sys.modules)
            run.sql("SELECT count(*) FROM records")._repr_html_()
            after = sorted(sys.modules)
        print(json.dumps([len(shown), before, after]))
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert out.stderr == ""
    shown, before, after = json.loads(out.stdout)
    assert shown == 12
    assert {"torch", "numpy", "pandas", "pyarrow", "rich", "plotly", "gradtrace.capture"}.isdisjoint(before)
    assert "torch" not in after
