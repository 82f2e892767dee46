"""Which modules a page has where there are more than it can hold."""

from __future__ import annotations

import pytest

from gradtrace.analysis.report import folding
from gradtrace.analysis.report.folding import fold
from gradtrace.analysis.run import open_run
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record
from tests.traces import write_run

BLOCKS, INSIDE = 6, 10
NAMES = ["", *(name for b in range(BLOCKS) for name in (f"b{b}", *(f"b{b}.x{i}" for i in range(INSIDE))))]


def run_of(tmp_path, names=tuple(NAMES), bad=()):
    values = {"numel": 4, "posinf_count": 0, "neginf_count": 0, "min": -1.0, "max": 1.0, "norm": 2.0}
    rows = [
        Record(0, seq, "forward", "output", name, "0", nan_count=int(name in bad), **values)
        for seq, name in enumerate(names)
    ]
    modules = [ModuleInfo(name, "Linear", root=not name, depth=name.count(".") + bool(name)) for name in names]
    return open_run(write_run(tmp_path / "run.parquet", rows, modules=modules))


def places(run):
    return dict(run.execute("FROM report_places").fetchall())


def test_a_model_that_fits_is_shown_as_it_is(tmp_path):
    with run_of(tmp_path) as run:
        assert fold(run, None) == 0
        assert places(run) == {}


def test_the_upper_levels_stay_and_the_others_count_as_part_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "MOST_MODULES", 20)
    with run_of(tmp_path, bad=("b3.x7",)) as run:
        assert fold(run, "b4.x2") == len(NAMES) - 20
        found = places(run)
    shown = {name for name, place in found.items() if name == place}
    assert len(shown) == 20
    assert {"", *(f"b{b}" for b in range(BLOCKS)), "b4.x2", "b3.x7"} <= shown
    assert found.keys() == set(NAMES)
    assert {name: place for name, place in found.items() if name not in shown} == {
        name: name.partition(".")[0] for name in NAMES if name not in shown
    }


def test_of_a_million_roots_the_first_are_shown_and_the_others_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "MOST_MODULES", 20)
    names = tuple(f"n{number}" for number in range(50))
    with run_of(tmp_path, names) as run:
        assert fold(run, "n49") == 30
        found = places(run)
    assert set(found) == {*(f"n{number}" for number in range(19)), "n49"}


def test_the_page_holds_what_was_folded_in_the_row_of_the_module_above(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "MOST_MODULES", 20)
    with run_of(tmp_path, bad=("b5.x9",)) as run:
        page = run.report(tmp_path / "run.html").read_text(encoding="utf-8")
    said = f"{len(NAMES)} modules are too many for a page: 20 are shown, the others count as part of the nearest"
    assert said in page


@pytest.mark.parametrize("name", ["a" + ".b" * 500_000, "." * 300_000])
def test_a_name_of_a_million_levels_is_no_work(tmp_path, name):
    with run_of(tmp_path, ("", name), bad=(name,)) as run:
        assert [row.module for row in run.first_nan().contained] == [name]
        assert len(run.summary(depth=1).lines) == 1
        assert run.diff(run).found is False
        assert run.report(tmp_path / "run.html").stat().st_size > 1000
