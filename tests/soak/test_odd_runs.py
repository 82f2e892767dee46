"""Runs of which something grows without bound: models, sessions, passes of one step, incidents, classes, shapes, paths.

What gradtrace keeps of them does not grow with them, nor does what a pass costs, and the file has all of it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.capture.steps import _MOST_ROWS
from tests.live_objects import live
from tests.soak.courses import GROWTH, Course, Net, query, run, said, step_of

Result = Callable[..., None]


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_run() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_300_models_in_one_recording(tmp_path: Path, result: Result) -> None:
    dead: list[Any] = []

    def trial(number: int) -> None:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            step_of(model, optimizer)
        dead[:] = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]

    with gradtrace.trace(None, tmp_path / "run.parquet") as tracer:
        trial(0)
        course = run(tracer, 300, trial)
        assert {reference() for reference in dead} == {None}
    assert query(tracer.path, "select count(*), max(step) from records where tensor = 'loss'") == [(1505, 1504)]
    result(
        "300 models made, trained and dropped in one recording",
        models=300,
        steps=1505,
        **course.of_bounded_cost(),
    )


def test_1000_recordings_in_one_process(tmp_path: Path, result: Result) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = nn.Module.__call__
    looks: list[tuple[int, int, int]] = []
    for number in range(1000):
        with gradtrace.trace(model, tmp_path / "run.parquet", overwrite=True) as tracer:
            step_of(model, optimizer)
            step_of(model, optimizer)
        assert tracer.info.steps == 2
        if number % 100 == 99:
            gc.collect()
            looks.append((len(os.listdir("/proc/self/fd")), threading.active_count(), sum(live().values())))
    assert nn.Module.__call__ is call
    assert (len({look[:2] for look in looks}), looks[-1][2]) == (1, looks[1][2])
    assert list(tmp_path.iterdir()) == [tmp_path / "run.parquet"]
    result(
        "1,000 recordings of one model in one process", recordings=1000, objects_left=0, files_left=0, threads_left=0
    )


def test_10000_calls_between_two_backward_passes(tmp_path: Path, result: Result) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradtrace.trace(model, tmp_path / "run.parquet") as tracer:
        step_of(model, optimizer)
        with torch.no_grad():
            course = run(tracer, 10_000, lambda number: model(torch.randn(3, 4)))
        step_of(model, optimizer)
    rows = query(
        tracer.path, "select count(*) from records where phase = 'evaluation' and module = '' and tensor = 'output'"
    )
    assert rows == [(10_000,)]
    result(
        "10,000 calls without grad between two backward passes, each with a mask of -inf inside",
        calls=10_000,
        **course.of_bounded_cost(),
    )


@pytest.mark.parametrize("mode", ["full", "watch"])
def test_10000_micro_batches_in_one_step(tmp_path: Path, result: Result, mode: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with gradtrace.trace(model, tmp_path / "run.parquet", mode=mode, watch_first=0) as tracer:
        step_of(model, optimizer)
        course = run(tracer, 10_000, lambda number: model(torch.randn(3, 4)).square().mean().backward())
        optimizer.step()
    losses = "select count(*), count(distinct micro_step), max(micro_step) from records where tensor='loss' and step=1"
    assert query(tracer.path, losses) == [(10_000, 10_000, 9_999)]
    result(
        f"10,000 micro-batches of gradient accumulation in one step, {mode}, each with a mask of -inf inside",
        micro_batches=10_000,
        **course.of_bounded_cost(),
    )


def test_a_step_that_never_ends(tmp_path: Path, result: Result) -> None:
    """There is an optimizer, so nothing else ends the step, and it never steps."""
    model = Net()
    waiting = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradtrace.trace(model, tmp_path / "run.parquet") as tracer:
        course = run(tracer, 20_000, lambda number: model(torch.randn(3, 4)).square().mean().backward())
    assert query(tracer.path, "select count(*), max(step) from records where tensor = 'loss'") == [(20_000, 0)]
    assert waiting.state == {}
    result(
        "20,000 passes of a step that no optimizer ever ends",
        passes=20_000,
        **course.of_bounded_cost(),
    )


def test_one_graph_gone_through_20000_times(tmp_path: Path, result: Result) -> None:
    """As a Jacobian is computed row by row."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradtrace.trace(model, tmp_path / "run.parquet") as tracer:
        step_of(model, optimizer)
        output = model(torch.randn(3, 4)).square().mean()
        weight = model.first.weight
        course = run(tracer, 20_000, lambda number: torch.autograd.grad(output, weight, retain_graph=True) and None)
    assert set(course.grown) <= {"Site"} and course.grown.get("Site", 0) <= _MOST_ROWS
    assert course.growth <= GROWTH
    assert query(tracer.path, "select count(*) from records where tensor = 'grad' and step = 1") == [(20_000,)]
    result(
        "One graph gone through 20,000 times by torch.autograd.grad",
        passes=20_000,
        most_rows_in_memory=course.most_rows,
        last_passes_to_earlier=course.growth,
    )


def test_every_step_non_finite(tmp_path: Path, result: Result) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with said() as words, gradtrace.trace(model, tmp_path / "run.parquet", max_size=2 * 10**6) as tracer:
        course = run(tracer, 20_000, lambda number: step_of(model, optimizer, torch.nan))
    assert tracer.path.stat().st_size <= 2 * 10**6
    counts = "select tensor, count(*) from records where phase = 'event' group by tensor order by tensor"
    events = dict(query(tracer.path, counts))
    assert events["incident"] == 1
    assert query(tracer.path, "select count(*) from records where tensor = 'loss' and nan_count = 1") == [(20_000,)]
    assert len(words) <= 3
    assert len(list(tmp_path.glob("*.capsule.pt"))) == 1
    with gradtrace.open_run(tracer.path) as opened:
        verdict = opened.first_nan().to_dict()
    assert (verdict["step"], len(verdict["incidents"])) == (0, 1)
    result(
        "20,000 steps, the loss of each of them NaN, --max-size 2 MB",
        steps=20_000,
        incidents=1,
        events=events,
        capsules=1,
        lines_said=len(words),
        **course.of_bounded_cost(),
        MB_of_the_file=tracer.path.stat().st_size / 1e6,
    )


def test_a_flood_of_incidents(tmp_path: Path, result: Result) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (model(torch.randn(3, 4)).square().mean() * (torch.nan if number % 2 else 1.0)).backward()
        if number % 2:
            optimizer.zero_grad()
        optimizer.step()

    with said() as words, gradtrace.trace(model, tmp_path / "run.parquet", max_size=4 * 10**6) as tracer:
        course = run(tracer, 20_000, step)
    assert tracer.info.incidents == 10_000
    assert tracer.path.stat().st_size <= 4 * 10**6
    alarms = [line for line in words if line.startswith("step ")]
    assert len(alarms) == 20 and alarms[-1].endswith("; more incidents will be recorded without a word")
    start = time.perf_counter()
    with gradtrace.open_run(tracer.path) as opened:
        verdict = opened.first_nan().to_dict()
    seconds = time.perf_counter() - start
    assert (verdict["step"], len(verdict["incidents"])) == (19_999, 10_000)  # the one that never ended
    result(
        "20,000 steps, every other one an incident of its own, --max-size 4 MB",
        steps=20_000,
        incidents=10_000,
        lines_said=len(words),
        **course.of_bounded_cost(),
        MB_of_the_file=tracer.path.stat().st_size / 1e6,
        seconds_to_the_verdict=seconds,
    )


def test_a_scaler_that_skips_for_ever(tmp_path: Path, result: Result) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 4)).square().mean() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()

    with said() as words, gradtrace.trace(model, tmp_path / "run.parquet") as tracer:
        course = run(tracer, 5_000, step)
    assert query(tracer.path, "select count(*) from records where tensor = 'skip'") == [(5_000,)]
    assert tracer.info.incidents == 1
    result(
        "A GradScaler that skips 5,000 steps in a row",
        steps=5_000,
        incidents=1,
        lines_said=len(words),
        **course.of_bounded_cost(),
    )


def test_a_class_of_its_own_for_each_of_3000_models(tmp_path: Path, result: Result) -> None:
    classes: weakref.WeakSet[type] = weakref.WeakSet()
    times = []
    with gradtrace.trace(None, tmp_path / "run.parquet") as tracer:
        for number in range(3_000):
            kind = type(f"Net{number}", (Net,), {})
            classes.add(kind)
            model = kind()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            start = time.perf_counter()
            step_of(model, optimizer)
            step_of(model, optimizer)
            times.append(time.perf_counter() - start)
            if number % 100 == 99:
                gc.collect()
        del kind, model, optimizer
        gc.collect()
        assert len(classes) == 0
        assert len(tracer._session.names.roots) <= 200
    course = Course(times)
    assert course.growth <= GROWTH
    assert query(tracer.path, "select count(*) from modules where type like 'Net%'") == [(3_000,)]
    result(
        "3,000 models, each of a class of its own",
        classes=3_000,
        classes_held=0,
        last_passes_to_earlier=course.growth,
    )


def test_20000_shapes_and_paths(tmp_path: Path, result: Result) -> None:
    class Named(nn.Module):
        """Takes and gives tensors by a name that is another one in each step."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: self.net(value) for name, value in given.items()}

    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        name = f"user {number}"
        model({name: torch.randn(1 + number % 7_000, 4)})[name].square().mean().backward()
        optimizer.step()

    with gradtrace.trace(model, tmp_path / "run.parquet") as tracer:
        blocks = []
        for number in range(20_000):
            step(number)
            if number % 5_000 == 4_999:
                blocks.append((sum(live().values()), sys.getallocatedblocks()))
    assert blocks[-1][0] <= 1.2 * blocks[1][0]
    assert query(tracer.path, "select count(distinct path) from records where module = '' and tensor = 'output'") == [
        (20_000,)
    ]
    result(
        "20,000 steps, each with a path of its own, 7,000 shapes in turn",
        steps=20_000,
        objects_after_10000_steps=blocks[1][0],
        objects_after_20000_steps=blocks[-1][0],
    )


def test_a_long_pause(tmp_path: Path, result: Result) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds = 60
    with gradtrace.trace(model, tmp_path / "run.parquet") as tracer:
        step_of(model, optimizer)
        before, threads = time.process_time(), threading.active_count()
        time.sleep(seconds)
        used = time.process_time() - before
        step_of(model, optimizer)
    assert used < 0.05
    assert threads <= 2
    apart = "select epoch(max(time)) - epoch(min(time)) from records"
    assert seconds <= query(tracer.path, apart)[0][0] < seconds + 30
    result("A training that rests for a minute", seconds_of_rest=seconds, seconds_of_processor_time=used)
