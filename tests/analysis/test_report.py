"""The page of the report as text: what is in it, what is not, and that it is written whole or not at all."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from traces import write_run

from gradtrace.analysis.report import page as report_page
from gradtrace.analysis.report import report_html, write_report
from gradtrace.analysis.report.page import data_text
from gradtrace.analysis.run import open_run
from gradtrace.errors import MissingPackageError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter
from tests.analysis.rows import NAN, Rows, backward, forward, healthy, open_rows, update

PLOTLY = "/* plotly.js */"


@pytest.fixture(autouse=True)
def small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes of charts say nothing of what is tested here."""
    monkeypatch.setattr("gradtrace.analysis.report.writing.plotly_script", lambda: PLOTLY)


def failing_rows(**bad: Any) -> Rows:
    rows = Rows()
    healthy(rows, 2)
    forward(rows, **(bad or {"act": NAN, "fc2_in": NAN, "fc2": NAN, "out": NAN}))
    backward(rows, loss=None, loss_counts=NAN)
    update(rows)
    return rows


def page_of(tmp_path: Path, rows: Rows, **info: Any) -> str:
    with open_rows(tmp_path, rows, **info) as run:
        return report_html(run)[0]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", markup))


def test_the_verdict_stands_there_in_the_words_of_first_nan(tmp_path):
    page = page_of(tmp_path, failing_rows())
    assert '<p class="headline">First non-finite value: step 2, forward, act (ReLU), output 0: 1 nan of 8</p>' in page
    assert "<dt>made by</dt><dd>act: its inputs were finite, and its parameters when last seen</dd>" in page
    assert "<dt>reached</dt><dd>loss at step 2</dd>" in page
    assert data_of(page)["failure"] == {"module": 2, "tensor": "output", "step": 2}


def test_the_path_marks_where_it_was_made_and_where_it_went(tmp_path):
    page = page_of(tmp_path, failing_rows())
    path = re.search(r'<ol class="path">(.*?)</ol>', page, re.DOTALL)
    assert path
    stops = re.findall(r'<li class="([^"]*)">(.*?)</li>', path[1])
    said = [(kind, " ".join(text_of(text).split())) for kind, text in stops]
    assert said[-4:] == [
        ("made", "step 2, forward act output 0 1 nan of 8 made"),
        ("passed-on", "step 2, forward fc2 input 0, output 0 1 nan of 8 passed on"),
        ("passed-on", "step 2, forward (root) output 0 1 nan of 8 passed on"),
        ("reached", "then reached loss at step 2"),
    ]
    assert {kind for kind, _ in said[:-4]} == {"finite"}


def test_a_healthy_run_says_so(tmp_path):
    rows = Rows()
    healthy(rows, 2)
    page = page_of(tmp_path, rows)
    assert "No NaN or Inf that matters in 2 steps of 4 modules" in page
    assert '<ol class="path">' not in page
    assert data_of(page)["failure"] is None


def test_the_facts_are_on_one_line_and_the_folders_of_the_run_are_nowhere(tmp_path):
    facts = {
        "command": ["train.py", "--name", "<i>"],
        "versions": {"torch": "2.13.0"},
        "started": "2026-01-02T03:04:05+00:00",
    }
    page = page_of(tmp_path, failing_rows(), **facts)
    line = re.search(r'<p class="facts">(.*)</p>', page)
    assert line
    assert text_of(line[1]).split(" · ") == [
        " train.py --name <i> ", "3 steps", "4 modules", "60 records", "torch 2.13.0",
        "started 2026-01-02 03:04:05 UTC", "completed",
    ]  # fmt: skip
    assert "<title>run.parquet</title>" in page
    assert str(tmp_path) not in page


def test_nothing_of_the_environment_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hunter2-hunter2")
    assert "hunter2" not in page_of(tmp_path, failing_rows())


def test_names_cannot_break_out_of_data_or_text(tmp_path):
    name = "</script><script>alert(1)</script>"
    rows = Rows()
    rows.add("forward", name, "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    page = page_of(tmp_path, rows, modules=[ModuleInfo("", "Net", root=True), ModuleInfo(name, name, depth=1)])
    assert "<script>alert" not in page
    assert data_of(page)["modules"]["name"] == ["", name]
    assert html.escape(name) in page


def test_data_holds_no_tag_and_no_token_that_json_does_not_know():
    assert data_text({"a": "</script><!--"}) == '{"a":"\\u003c/script>\\u003c!--"}'
    with pytest.raises(ValueError, match="JSON"):
        data_text({"a": float("nan")})


def test_an_argument_that_is_no_unicode_is_drawn_all_the_same(tmp_path):
    with open_rows(tmp_path, failing_rows(), command=["train.py", "caf\udce9.txt"]) as run:
        page = run.report(tmp_path / "run.html").read_text(encoding="utf-8")
    assert "<code>train.py caf\\udce9.txt</code>" in page


def test_the_page_allows_its_own_scripts_only(tmp_path):
    page = page_of(tmp_path, failing_rows())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    directives = dict(part.strip().split(" ", 1) for part in policy[1].split(";"))
    assert directives["default-src"] == "'none'"
    assert re.fullmatch(r"('sha256-[A-Za-z0-9+/=]{44}' ?){2}", directives["script-src"])
    outside = re.findall(r"""(?:src|href)=["'](?!data:)[^"']*""", page)
    assert outside == []
    assert page.count("<script") == 3  # the data, plotly.js, the page's own


def test_a_run_without_records_has_a_page(tmp_path):
    page = page_of(tmp_path, Rows())
    assert "The run holds no records, so nothing can be said of it." in page
    data = data_of(page)
    assert (data["tensors"], data["courses"], data["events"], data["grid"]["count"]) == ({}, {}, [], 0)


def test_an_unfinished_run_is_drawn_as_far_as_it_got_and_the_page_says_so(tmp_path):
    rows = failing_rows().records
    writer = RunWriter(tmp_path / "run.parquet", RunInfo("test", modules=[ModuleInfo("", "Net", root=True)]))
    for step in range(3):
        writer.write(batch_of_records(row for row in rows if row.step == step))
    with open_run(tmp_path / "run.parquet") as run:
        page, found = report_html(run)
    assert found.grid.count == 3
    assert "the run is still being recorded; this is what there is up to step 2" in page
    writer.finish(RunInfo("test", end="completed"))


def test_several_ranks_are_drawn_as_one_or_one_alone(tmp_path):
    for rank in (0, 1):
        record = Record(0, 0, "forward", "output", "a", "0", rank=rank, nan_count=0, norm=1.0)
        write_run(tmp_path / "run.parquet", [record], rank=rank, world_size=2)
    with open_run(tmp_path / "run.parquet") as run:
        assert report_html(run)[1].notes == ["each number is the most extreme of 2 ranks; --rank N shows one alone"]
        assert report_html(run, rank=1)[1].notes == ["only rank 1 of 2 is shown"]


def test_chosen_steps_alone_are_drawn_and_the_page_says_which(tmp_path):
    with open_rows(tmp_path, failing_rows()) as run:
        page, found = report_html(run, steps=(1, 3), title="Around <it>")
    assert (found.grid.first, found.grid.count) == (1, 2)
    assert found.notes == ["only steps 1:3 are shown"]
    assert "<title>Around &lt;it&gt;</title>" in page


def test_the_share_that_is_done_only_grows(tmp_path):
    shares: list[float] = []
    with open_rows(tmp_path, failing_rows()) as run:
        report_html(run, progress=shares.append)
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] <= 1


def test_asking_for_a_page_twice_gives_the_same_page(tmp_path):
    with open_rows(tmp_path, failing_rows()) as run:
        assert report_html(run)[0] == report_html(run)[0]


def test_run_report_writes_the_page(tmp_path):
    with open_rows(tmp_path, failing_rows()) as run:
        path = run.report(tmp_path / "out.html", title="mine")
        assert path == tmp_path / "out.html"
        assert path.read_text(encoding="utf-8") == report_html(run, title="mine")[0]


def test_what_fails_leaves_the_older_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "pages" / "run.html"
    target.parent.mkdir()
    target.write_text("older")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    with open_rows(tmp_path, failing_rows()) as run:
        monkeypatch.setattr("os.replace", refuse)
        with pytest.raises(OSError, match="no space left"):
            write_report(run, target)
    assert [path.name for path in target.parent.iterdir()] == ["run.html"]
    assert target.read_text() == "older"


def test_without_plotly_the_error_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingPackageError) as caught:
        report_page.plotly_script()
    assert str(caught.value) == "a report needs plotly: pip install 'gradtrace[report]'"


def test_plotly_comes_from_its_package():
    script = report_page.plotly_script()
    assert "plotly.js v" in script[:100]
    assert "</script" not in script.lower()
