"""The summary against literal rows, with values worked out by hand."""

from __future__ import annotations

import math

import pytest
from traces import write_run

from gradtrace.analysis.run import open_run
from gradtrace.analysis.summary import by_module, by_step, by_type, courses
from gradtrace.analysis.summary_model import Course, ModuleLine, StepLine
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record

MODULES = [
    ModuleInfo("", "Net", root=True, depth=0, calls=4),
    ModuleInfo("body", "Sequential", depth=1, calls=4),
    ModuleInfo("body.0", "Linear", depth=2, parameters={"weight": "[3, 2]", "bias": "[3]"}, calls=4),
    ModuleInfo("body.1", "ReLU", depth=2, calls=4),
    ModuleInfo("head", "Linear", depth=1, parameters={"weight": "[1, 3]"}, calls=4),
]


def step_rows(step: int, *, bad: bool = False) -> list[Record]:
    """Return one step: norms grow with the step; ``bad`` makes the gradient of body.0.weight NaN."""
    scale = float(step + 1)
    output = {"phase": "forward", "tensor": "output", "path": "0"}
    grad = {"phase": "backward", "tensor": "grad"}
    wrong = {"nan_count": 6} if bad else {"norm": 3 * scale, "min": -2 * scale, "max": scale}
    rows = [
        Record(step, 0, module="body.0", norm=2 * scale, min=-4 * scale, max=scale, **output),
        Record(step, 0, module="body.1", norm=scale, min=0.0, max=scale, **output),
        Record(step, 0, module="head", norm=5 * scale, min=1.0, max=5 * scale, **output),
        Record(step, 0, "loss", "loss", max=scale, nan_count=0),
        # Two passes: the first pass's gradient of head is not the one that counts.
        Record(step, 0, module="head", path="weight", norm=50.0, min=0.0, max=50.0, **grad),
        Record(step, 0, module="head", path="weight", micro_step=1, norm=scale, min=0.0, max=1.0, **grad),
        Record(step, 0, module="body.0", path="weight", micro_step=1, **wrong, **grad),
        Record(step, 0, module="body.0", path="bias", micro_step=1, norm=4 * scale, min=0.0, max=1.0, **grad),
        Record(step, 0, "optimizer", "param", "body.0", "weight", norm=9.0, min=-7.0, max=7.5),
        Record(step, 0, "optimizer", "param", "head", "weight", posinf_count=1, norm=1.0, min=0.5, max=0.75),
    ]
    return [row._replace(seq=step * len(rows) + number) for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("summary") / "run.parquet"
    rows = [row for step in range(4) for row in step_rows(step, bad=step == 3)]
    with open_run(write_run(path, rows, modules=MODULES)) as opened:
        yield opened


def test_a_line_a_module_in_model_order(run):
    lines = by_module(run)
    assert [line.name for line in lines] == ["", "body", "body.0", "body.1", "head"]
    assert repr(lines[2]) == repr(
        ModuleLine(
            "body.0",
            "Linear",
            parameters=9,
            calls=4,
            records=16,
            grad_norms=[5.0, 10.0, 15.0, math.nan],  # sqrt(3² + 4²) a step
            grad_norm=16.0,  # of step 3: the finite gradient alone
            output_norms=[2.0, 4.0, 6.0, 8.0],
            max_output=16.0,
            max_grad=6.0,
            max_param=7.5,
            nan=1,
            inf=0,
        )
    )
    assert lines[4].grad_norms == [1.0, 2.0, 3.0, 4.0]
    assert (lines[4].inf, lines[4].max_param) == (4, 0.75)


def test_a_module_that_has_no_records_has_an_empty_line(run):
    empty = [None] * 4
    assert by_module(run)[0] == ModuleLine("", "Net", calls=4, grad_norms=empty, output_norms=empty)


def test_depth_folds_what_lies_deeper(run):
    lines = by_module(run, depth=1)
    assert [(line.name, line.type) for line in lines] == [
        ("", "Net"),
        ("body", "Sequential"),
        ("head", "Linear"),
    ]
    body = lines[1]
    assert (body.parameters, body.calls, body.records, body.nan) == (9, 4, 20, 1)
    assert repr(body.grad_norms) == repr([5.0, 10.0, 15.0, math.nan])
    assert body.output_norms == [2.0, 4.0, 6.0, 8.0]
    everything = by_module(run, depth=0)
    assert [line.name for line in everything] == [""]
    assert everything[0].grad_norms[1] == pytest.approx(math.sqrt(10**2 + 2**2))
    assert everything[0].parameters == 12


def test_a_line_a_type(run):
    lines = by_type(run)
    assert [line.name for line in lines] == ["Net", "Sequential", "Linear", "ReLU"]
    linear = lines[2]
    assert (linear.parameters, linear.calls, linear.max_output, linear.inf) == (12, 8, 20.0, 4)
    assert linear.grad_norms[0] == pytest.approx(math.sqrt(5**2 + 1))


def test_a_line_a_step(run):
    lines = by_step(run)
    assert lines[1] == StepLine(
        rank=0,
        step=1,
        level="full",
        records=10,
        loss=2.0,
        grad_norm=pytest.approx(math.sqrt(10**2 + 2**2)),
        lr=None,
        max_output=10.0,
        max_grad=50.0,
        max_param=7.5,
        nan=0,
        inf=1,
        skipped=False,
    )
    assert [line.nan for line in lines] == [0, 0, 0, 1]


def test_a_step_with_one_pass_has_the_same_norms_by_the_short_way(tmp_path):
    rows = [
        row._replace(micro_step=0, seq=number)
        for number, row in enumerate(row for step in range(4) for row in step_rows(step) if row.norm != 50.0)
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows, modules=MODULES)) as run:
        lines = by_module(run)
    assert lines[2].grad_norms == [5.0, 10.0, 15.0, 20.0]
    assert lines[4].grad_norms == [1.0, 2.0, 3.0, 4.0]
    assert (lines[2].grad_norm, lines[4].grad_norm) == (20.0, 4.0)


def test_several_losses_in_one_micro_step_are_several_passes(tmp_path):
    grad = {"phase": "backward", "tensor": "grad", "module": "head", "path": "weight"}
    rows = [
        Record(0, 0, "loss", "loss", max=1.0),
        Record(0, 1, norm=30.0, **grad),
        Record(0, 2, "loss", "loss", max=1.0),
        Record(0, 3, norm=4.0, **grad),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows, modules=MODULES)) as run:
        assert by_module(run)[4].grad_norm == 4.0


def test_watched_steps_show_their_loss_and_the_norm_of_their_gradients(tmp_path):
    norm = {"shape": "[]", "numel": 1, "nan_count": 0, "posinf_count": 0, "neginf_count": 0}
    watched = [
        Record(4, 40, "forward", "output", "", norm=2.0, min=0.0, max=2.0),
        Record(4, 41, "loss", "loss", max=0.5, nan_count=0),
        Record(4, 42, "backward", "grad_norm", min=8.0, max=8.0, norm=8.0, **norm),
    ]
    rows = [row for step in range(4) for row in step_rows(step)] + watched
    with open_run(write_run(tmp_path / "run.parquet", rows, modules=MODULES)) as run:
        last = by_step(run)[-1]
        assert [line.grad_norms[-1] for line in by_module(run)] == [None] * 5
        course = courses(run)
    assert course["loss"] == Course([1.0, 2.0, 3.0, 4.0, 0.5], last=0.5)
    totals = [math.hypot(5 * scale, scale) for scale in (1, 2, 3, 4)]
    assert course["grad_norm"] == Course([*map(pytest.approx, totals), 8.0], last=8.0)
    assert (last.step, last.level, last.loss, last.grad_norm, last.max_output) == (4, "watched", 0.5, 8.0, 2.0)
    assert (last.max_grad, last.max_param, last.records) == (None, None, 3)


def test_a_course_shows_what_is_not_finite_and_the_size_of_a_negative_loss(tmp_path):
    rows = [
        Record(0, 0, "loss", "loss", max=-3.0),
        Record(0, 1, "backward", "grad", "head", "weight", nan_count=1),
        Record(1, 2, "loss", "loss", posinf_count=1),
        Record(1, 3, "backward", "grad_norm", posinf_count=1),
        Record(2, 4, "loss", "loss", max=-7.0),
        Record(2, 5, "loss", "loss", max=-2.0),
    ]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        found = courses(run)
    assert repr(found["loss"]) == repr(Course([3.0, math.inf, 7.0], last=-2.0))
    assert repr(found["grad_norm"]) == repr(Course([math.nan, math.inf, None], last=math.inf))


def test_many_steps_make_a_series_of_a_bounded_number_of_points(tmp_path):
    rows = [Record(step, step, "forward", "output", "m", norm=float(step)) for step in range(10, 110)]
    with open_run(write_run(tmp_path / "run.parquet", rows)) as run:
        (line,) = by_module(run)
    assert len(line.output_norms) == 16
    assert line.output_norms[0] == 16.0  # the largest of steps 10 to 16: 100 steps in 16 stretches
    assert line.output_norms[-1] == 109.0


def test_modules_that_only_the_records_know_come_last(tmp_path):
    rows = [Record(0, 0, "forward", "output", "x.y", norm=1.0), Record(0, 1, "loss", "loss")]
    with open_run(write_run(tmp_path / "run.parquet", rows, modules=MODULES[:1])) as run:
        assert [line.name for line in by_module(run)] == ["", "x.y"]
        assert [(line.name, line.records) for line in by_module(run, depth=1)] == [("", 1)]


def test_a_run_without_records(tmp_path):
    with open_run(write_run(tmp_path / "run.parquet", [], modules=MODULES)) as run:
        assert [line.records for line in by_module(run)] == [0] * 5
        assert by_step(run) == []
