"""What the report draws, against literal rows: columns, cells, courses, events, modules, the path of a failure."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable

import pyarrow as pa
import pytest
from traces import write_run

from gradtrace.analysis.report import cells
from gradtrace.analysis.report.cells import Planes, count_cells, grid_with_room, kept_bytes, planes
from gradtrace.analysis.report.course import courses, events
from gradtrace.analysis.report.grid import Grid, Selection, grid_of
from gradtrace.analysis.report.modules import Module, modules, parents_first, parents_of
from gradtrace.analysis.report.packing import pack
from gradtrace.analysis.report.path import MOST_STOPS, Stop, failure_path
from gradtrace.analysis.run import open_run
from gradtrace.analysis.verdict_model import Fate
from gradtrace.errors import NoMatchError
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record
from tests.analysis.rows import NAN, Rows, backward, forward, healthy, open_rows, update

ALL = Selection()
FINITE = {"nan_count": 0, "posinf_count": 0, "neginf_count": 0}


def unpacked(text: str, kept: int = 4) -> list[float | None]:
    """Return the numbers of a plane as the page reads them; None is NaN."""
    data = zlib.decompress(base64.b64decode(text))
    count = len(data) // kept
    weights = [data[place * count : (place + 1) * count] for place in range(kept)] + [bytes(count)] * (4 - kept)
    values = [struct.unpack(">f", bytes(four))[0] for four in zip(*weights, strict=True)]
    return [None if math.isnan(value) else value for value in values]


def matrix(plane: Planes, statistic: str, kept: int = 4) -> list[list[float | None]]:
    """Return a plane with a row for each module."""
    values = unpacked(plane.packed[statistic], kept)
    width = plane.count // len(plane.modules)
    return [values[start : start + width] for start in range(0, len(values), width)]


def drawn(run, selection: Selection = ALL, names: Iterable[str] = ("a", "b")) -> tuple[Grid, dict[str, Planes]]:
    grid = count_cells(run, selection, grid_of(run, selection), lambda share: None)
    return grid, planes(run, grid, {name: place for place, name in enumerate(names)})


def output(step: int, seq: int, module: str = "a", **values: object) -> Record:
    facts = FINITE | {"min": -1.0, "max": 1.0, "norm": 2.0, "path": "0"} | values
    return Record(step, seq, "forward", "output", module, **facts)  # type: ignore[arg-type]


def losses(values: Iterable[float]) -> list[Record]:
    return [
        Record(step, step, "loss", "loss", **FINITE, min=value, max=value, norm=abs(value))
        for step, value in enumerate(values)
    ]


def test_a_short_run_has_a_column_for_each_step(tmp_path):
    with open_run(write_run(tmp_path / "run.parquet", [output(step, step) for step in range(5, 9)])) as run:
        grid = grid_of(run, ALL)
    assert grid == Grid(first=5, last=8, width=1, steps=4)
    assert grid.count == 4


def test_where_only_each_tenth_step_was_recorded_no_column_is_empty_for_it(tmp_path):
    with open_run(write_run(tmp_path / "run.parquet", [output(step, step) for step in range(3, 1000, 10)])) as run:
        grid = grid_of(run, ALL)
    assert (grid.first, grid.width, grid.count) == (3, 10, 100)


def test_a_long_run_is_drawn_in_columns_of_equal_width(tmp_path):
    with open_run(write_run(tmp_path / "run.parquet", [output(step, step) for step in (0, 1, 9_999)])) as run:
        grid = grid_of(run, ALL)
    assert (grid.width, grid.count) == (17, 589)  # 10,000 / 600, rounded up; 10,000 / 17, rounded up


def test_steps_that_were_not_recorded_are_refused(tmp_path):
    with open_run(write_run(tmp_path / "run.parquet", [output(step, step) for step in range(3)])) as run:
        with pytest.raises(NoMatchError, match="no recorded step lies in 7:9; the run has 0 to 2"):
            grid_of(run, Selection((7, 9)))
        with pytest.raises(NoMatchError, match="has no rank 4; it has: 0"):
            grid_of(run, Selection(rank=4))


def test_cells_hold_the_extremes_of_all_that_falls_into_them(tmp_path):
    rows = [
        output(0, 0, norm=3.0, min=-4.0, max=1.0),
        output(0, 1, norm=5.0, min=-1.0, max=2.5, call=1),
        output(1, 2, norm=None, min=None, max=None, nan_count=7, posinf_count=2, neginf_count=1),
        output(1, 3, "b", norm=1.0, min=0.5, max=0.75),
        output(1, 4, "b", norm=99.0, op="aten.mul"),  # of a single operation
        Record(1, 5, "event", "incident", "a", detail="words"),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        grid, found = drawn(run)
    assert grid.count == 2
    assert list(found) == ["output"]
    plane = found["output"]
    assert plane.modules == [0, 1]
    assert matrix(plane, "norm") == [[5.0, None], [None, 1.0]]
    assert matrix(plane, "min") == [[-4.0, None], [None, 0.5]]
    assert matrix(plane, "max") == [[2.5, None], [None, 0.75]]
    assert matrix(plane, "nan") == [[0.0, 7.0], [None, 0.0]]
    assert matrix(plane, "inf") == [[0.0, 3.0], [None, 0.0]]


def test_thinning_keeps_a_spike_and_a_single_nan_in_ten_thousand_steps(tmp_path):
    def at(step: int) -> Record:
        if step == 4_321:
            return output(step, step, norm=1e6, max=3e5)
        return output(step, step, **({"nan_count": 1} if step == 7_654 else {}))

    with open_run(write_run(tmp_path / "run.parquet", map(at, range(10_000)), steps_at_once=1_000)) as run:
        grid, found = drawn(run)
    [norms], [largest], [nans] = (matrix(found["output"], name) for name in ("norm", "max", "nan"))
    assert len(norms) == grid.count == 589
    assert {column for column, norm in enumerate(norms) if norm != 2.0} == {4_321 // 17}
    assert (norms[254], largest[254]) == (1e6, 3e5)
    assert {column for column, count in enumerate(nans) if count} == {7_654 // 17}


def test_a_trace_read_in_stretches_gives_the_same_cells(tmp_path, monkeypatch):
    rows = [output(step, step, norm=float(step)) for step in range(50)]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        assert run.info.records == 50
        _, whole = drawn(run)
        monkeypatch.setattr(cells, "MOST_ROWS_AT_ONCE", 7)
        shares: list[float] = []
        grid = count_cells(run, ALL, grid_of(run, ALL), shares.append)
        assert planes(run, grid, {"a": 0}) == whole
    assert len(shares) == 8  # stretches of seven steps
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert matrix(whole["output"], "norm") == [[float(step) for step in range(50)]]


def test_columns_are_as_many_as_there_is_room_for(tmp_path, monkeypatch):
    rows = [output(step, 2 * step + place, name) for step in range(10) for place, name in enumerate("ab")]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        assert grid_with_room(run, ALL).count == 10
        monkeypatch.setattr(cells, "MOST_CELLS", 8)
        grid = grid_with_room(run, ALL)
    assert (grid.width, grid.count) == (3, 4)  # two modules with four columns each


def test_too_many_cells_are_made_fewer_and_keep_their_extremes(tmp_path, monkeypatch):
    rows = [output(step, 2 * step, norm=float(step)) for step in range(10)]
    rows += [output(step, 2 * step + 1, "b", nan_count=int(step == 5)) for step in range(10)]
    monkeypatch.setattr(cells, "MOST_CELLS", 10)
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        grid, found = drawn(run)
    assert (grid.width, grid.count) == (2, 5)
    assert matrix(found["output"], "norm") == [[1.0, 3.0, 5.0, 7.0, 9.0], [2.0] * 5]
    assert matrix(found["output"], "nan")[1] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_one_rank_or_the_extremes_of_all(tmp_path):
    for rank, norm in ((0, 4.0), (1, 9.0)):
        rows = [output(0, 0, norm=norm, rank=rank)]
        write_run(tmp_path / "run.parquet", rows, rank=rank, world_size=2)
    with open_run(tmp_path / "run.parquet") as run:
        assert matrix(drawn(run)[1]["output"], "norm") == [[9.0]]
        assert matrix(drawn(run, Selection(rank=0))[1]["output"], "norm") == [[4.0]]


def test_packed_numbers_come_back_and_what_is_too_large_for_a_float32_stays_finite():
    values = pa.chunked_array([[0.0, -1.5, None], [65504.0, 1e300, -1e300, 1.40129846e-45]], pa.float64())
    exact = [0.0, -1.5, None, 65504.0]
    assert unpacked(pack(values, 4))[:4] == exact
    large, small, tiny = unpacked(pack(values, 4))[4:]
    assert large == pytest.approx(3.38e38) and small == pytest.approx(-3.38e38) and tiny > 0
    rounded = unpacked(pack(values, 3), 3)
    assert rounded[2] is None
    assert rounded[3] == pytest.approx(65504.0, rel=2**-16)
    assert all(value is None or math.isfinite(value) for value in rounded)
    assert unpacked(pack(pa.chunked_array([[3.14159265]]), 3), 3)[0] == pytest.approx(3.14159265, rel=2**-16)


def test_few_cells_keep_all_bits():
    assert (kept_bytes(cells.FINE_CELLS), kept_bytes(cells.FINE_CELLS + 1)) == (4, 3)


def test_courses_of_a_thinned_run_keep_extremes_the_last_value_and_what_is_not_finite(tmp_path):
    values = [1.0] * 1_200
    values[3], values[10], values[1_000] = 50.0, -7.0, 2.0
    rows = losses(values)
    rows[1_001] = rows[1_001]._replace(nan_count=1, min=None, max=None, norm=None)
    rows[1_101] = rows[1_101]._replace(posinf_count=1, min=None, max=None, norm=None)
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        found = courses(run, ALL, grid_of(run, ALL))
    assert list(found) == ["loss"]
    loss = found["loss"]
    assert len(loss.low) == 600  # two steps each
    assert (loss.low[1], loss.high[1], loss.last[1]) == (1.0, 50.0, 50.0)
    assert (loss.low[5], loss.high[5], loss.last[5]) == (-7.0, 1.0, 1.0)
    assert (loss.low[500], loss.high[500], loss.last[500]) == (2.0, 2.0, 2.0)
    assert loss.bad == {500: (1, 1_001), 550: (1, 1_101)}


def test_the_gradient_norm_is_that_of_the_last_pass_and_watched_steps_have_their_own_row(tmp_path):
    grad = {"phase": "backward", "tensor": "grad", **FINITE}
    rows = [
        Record(0, 0, module="a", path="weight", norm=100.0, **grad),
        Record(0, 1, module="a", path="weight", norm=3.0, micro_step=1, **grad),
        Record(0, 2, module="b", path="weight", norm=4.0, micro_step=1, **grad),
        Record(1, 3, "backward", "grad_norm", max=2.5, **FINITE),
        Record(2, 4, module="a", path="weight", norm=1.0, **{**grad, "nan_count": 1}),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        norm = courses(run, ALL, grid_of(run, ALL))["grad_norm"]
    assert norm.last == [5.0, 2.5, None]
    assert norm.bad == {2: (1, 2)}


def test_learning_rates_are_those_of_the_first_group(tmp_path):
    rows = [
        Record(0, 0, "optimizer", "lr", path="0.0", max=0.1, **FINITE),
        Record(0, 1, "optimizer", "lr", path="0.1", max=0.5, **FINITE),
        Record(0, 2, "optimizer", "loss_scale", path="0", max=65536.0, **FINITE),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        found = courses(run, ALL, grid_of(run, ALL))
    assert {name: course.last for name, course in found.items()} == {"lr": [0.1], "loss_scale": [65536.0]}


def test_events_of_one_kind_and_column_are_counted(tmp_path):
    rows = losses([1.0] * 1_200)
    rows += [Record(step, 5_000 + step, "event", "skip", detail=f"skipped {step}") for step in (0, 1, 2)]
    rows += [Record(2, 6_000, "event", "switch", detail="in full"), Record(2, 6_001, "event", "replay", detail="{}")]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        found = events(run, ALL, grid_of(run, ALL))
    said = [(event.name, event.column, event.count, event.first_step, event.last_step) for event in found]
    assert said == [("skip", 0, 2, 0, 1), ("skip", 1, 1, 2, 2), ("switch", 1, 1, 2, 2)]
    assert found[0].detail == "skipped 0"


def test_modules_form_a_tree_in_model_order_with_what_was_measured(tmp_path):
    table = [
        ModuleInfo("", "Net", root=True, calls=3),
        ModuleInfo("body.0", "Linear", depth=2, parameters={"weight": "[3, 2]", "bias": "[3]"}, calls=3),
    ]
    grad = {"phase": "backward", "tensor": "grad", "module": "body.0"}
    rows = [
        Record(0, 0, path="weight", norm=6.0, min=-9.0, max=1.0, **grad, **FINITE),
        Record(1, 1, path="weight", norm=3.0, min=-0.5, max=1.0, **grad, **FINITE),
        Record(1, 2, path="bias", norm=4.0, min=0.0, max=1.0, **grad, **FINITE),
        Record(2, 3, path="weight", norm=7.0, min=0.0, max=1.0, **grad, **(FINITE | {"nan_count": 1})),
        output(2, 4, "body.0", min=-12.0, max=3.0),
        output(2, 5, "unlisted", posinf_count=1, neginf_count=1),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows, modules=table)) as run:
        count_cells(run, ALL, grid_of(run, ALL), lambda share: None)
        found = modules(run, ALL)
    linear = Module("body.0", "Linear", 0, 9, 3, grad_norm=5.0, max_output=12.0, max_grad=9.0, nan=1)
    assert found == [Module("", "Net", None, 0, 3), linear, Module("unlisted", "", 0, 0, 0, max_output=1.0, inf=1)]


def test_a_module_lies_in_the_nearest_one_that_is_listed():
    names = ["generator", "generator.main.0", "generator.main.0.act", "critic", "critic.0"]
    assert parents_of(names) == dict(zip(names, [None, 0, 1, None, 3], strict=True))


def test_what_lies_in_a_module_follows_it_whatever_the_order_of_the_table():
    assert parents_first(["a", "b", "a.1", "b.0", "a.1.x", "a.0"]) == ["a", "a.1", "a.1.x", "a.0", "b", "b.0"]


def test_the_path_of_a_failure_leads_from_finite_boundaries_over_where_it_was_made_to_where_it_went(tmp_path):
    rows = Rows()
    healthy(rows, 2)
    forward(rows, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    backward(rows, loss=None, loss_counts=NAN)
    update(rows)
    with open_rows(tmp_path, rows) as run:
        path = failure_path(run, run.first_nan())
    assert all(isinstance(stop, Stop) for stop in path)
    said = [(stop.first.step, stop.first.module, [one.tensor for one in stop.records], stop.fate) for stop in path]
    assert said[-5:] == [
        (2, "fc1", ["output"], None),
        (2, "act", ["input"], None),
        (2, "act", ["output"], Fate.MADE),
        (2, "fc2", ["input", "output"], Fate.PASSED_ON),
        (2, "", ["output"], Fate.PASSED_ON),
    ]


def test_a_long_path_says_how_many_places_it_leaves_out(tmp_path):
    names = [f"layer{number}" for number in range(30)]
    table = [ModuleInfo("", "Net", root=True), *(ModuleInfo(name, "Linear", depth=1) for name in names)]
    rows = Rows()
    rows.add("input", "", "input")
    rows.add("forward", names[0], "input")
    for name in names:
        rows.add("forward", name, "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    with open_rows(tmp_path, rows, modules=table) as run:
        path = failure_path(run, run.first_nan())
    made = next(place for place, stop in enumerate(path) if isinstance(stop, Stop) and stop.fate is Fate.MADE)
    after = path[made + 1 :]
    assert len(after) == MOST_STOPS + 1
    assert [stop for stop in after if isinstance(stop, int)] == [30 - MOST_STOPS]  # 29 layers and the root


def test_a_healthy_run_has_no_path(tmp_path):
    rows = Rows()
    healthy(rows, 2)
    with open_rows(tmp_path, rows) as run:
        assert failure_path(run, run.first_nan()) == []
