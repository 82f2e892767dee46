"""The life of a recording: options, the file while it is recorded and after, death in the middle."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.tracing import read
from torch import nn

import gradtrace
from gradtrace.analysis.verdict import first_nan
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import CaptureError, RunExistsError


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("read_first", [True, False])
def test_the_public_names_are_what_they_should_be_in_any_order_of_imports(read_first: bool) -> None:
    code = [
        "gradtrace.open_run; import gradtrace.trace.writer, gradtrace.trace.schema" if read_first else "pass",
        "assert callable(gradtrace.trace), gradtrace.trace",
        "from gradtrace import trace, Tracer; from gradtrace.trace.schema import COLUMNS",
        "import gradtrace.trace.runinfo",
        "assert trace is gradtrace.trace is sys.modules['gradtrace.capture.block'].trace",
        "assert Tracer is gradtrace.Tracer and gradtrace.open_run and gradtrace.Run",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(["import sys, gradtrace", *code])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_answers_while_it_is_recorded_and_after(tmp_path: Path) -> None:
    model = make_model()
    path = tmp_path / "run.parquet"
    with gradtrace.trace(model, path) as tracer:
        train(model)
        run = gradtrace.open_run(tracer.path)
        assert run.info.end == "running"
        assert run.sql("select distinct step from records order by 1").rows == [(0,), (1,)]
        assert first_nan(run).found is False
        assert run.sql("select module, type from modules order by module").rows == [
            ("", "Sequential"),
            ("0", "Linear"),
            ("1", "ReLU"),
            ("2", "Linear"),
        ]
        with torch.no_grad():
            model[2].weight[0, 0] = math.nan
        train(model, 1)
        assert first_nan(gradtrace.open_run(tracer.path)).found is True
    assert path.is_file()
    assert gradtrace.open_run(tracer.path).info.end == "completed"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.capsule.pt", "run.parquet"]


def test_the_file_says_what_was_recorded(tmp_path: Path) -> None:
    model = make_model()
    options: dict[str, Any] = {"every": 2, "steps": (10, None), "first_step": 10, "exclude": ["1"]}
    with Tracer(model, tmp_path / "run.parquet", command=["train.py", "--lr", "1"], **options) as tracer:
        train(model, 3)
    recorded = read(tmp_path / "run.parquet")
    info = recorded.info
    assert (info.end, info.steps, info.last_step, info.records) == ("completed", 3, 12, len(recorded.rows))
    assert info.captured == 2
    assert info.command == ["train.py", "--lr", "1"]
    assert info.versions["torch"] == torch.__version__
    assert info.config == {
        "mode": "full",
        "engine": "graph",
        "every": 2,
        "steps": [10, None],
        "first_step": 10,
        "include": [],
        "exclude": ["1"],
        "replays": 3,
        "on_nonfinite": "continue",
        "keep_compiled": False,
        "loss_lines": True,
        "op_steps": None,
        "capsule_limit": 2**30,
        "max_size": 2 * 10**9,
        "triggers": None,
        "baseline": None,
    }
    assert info.started < str(info.finished)
    assert (info.rank, info.world_size, info.incidents) == (0, 1, 0)
    assert tracer.info == info or tracer.info.to_json() == info.to_json()
    assert tracer.bytes_written == (tmp_path / "run.parquet").stat().st_size


def test_incidents_are_counted_as_the_run_goes(tmp_path: Path) -> None:
    model = make_model()
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        train(model)
        with torch.no_grad():
            model[0].bias[0] = math.inf
        train(model)
    assert tracer.info.incidents == 1


def test_patterns_choose_modules_and_those_that_match_nothing_are_said(tmp_path: Path) -> None:
    model = make_model()
    with Tracer(model, tmp_path / "run.parquet", include=["[02]", "head.*"], exclude=["2"]):
        train(model)
    recorded = read(tmp_path / "run.parquet")
    assert {row["module"] for row in recorded.rows if row["module"] is not None} == {"0"}
    assert {row["tensor"] for row in recorded.where(module="0")} >= {"input", "output", "grad", "param"}
    assert len(recorded.where(tensor="loss")) == 2
    assert recorded.info.notes == ["pattern 'head.*' matched no module"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "magic"}, "no such engine: 'magic'"),
        ({"every": 0}, "every=0"),
        ({"steps": (3, 3)}, "no step lies in 3:3"),
        ({"models": {"a": 3}}, "'a' is no nn.Module"),
    ],
    ids=["engine", "every", "steps", "models"],
)
def test_what_makes_no_sense_is_refused_at_once(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Tracer(path=tmp_path / "run.parquet", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_watched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    call = nn.Module.__call__
    with pytest.raises(CaptureError, match="cannot write"):
        Tracer(None, tmp_path / "file" / "run.parquet").start()
    assert nn.Module.__call__ is call


def test_a_tracer_starts_once_and_stops_as_often_as_one_likes(tmp_path: Path) -> None:
    tracer = Tracer(make_model(), tmp_path / "run.parquet")
    assert tracer.stop().end == "running"
    tracer.start()
    with pytest.raises(CaptureError, match="started once"):
        tracer.start()
    assert tracer.stop().end == tracer.stop("exit 3").end == "completed"
    tracer.stop_quickly("signal SIGTERM")
    assert read(tmp_path / "run.parquet").info.end == "completed"


def test_an_older_run_is_refused_overwritten_or_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    for existing, steps in (("refuse", 1), ("move_aside", 2), ("overwrite", 3)):
        model = make_model()
        with Tracer(model, path, existing=existing) as tracer:  # type: ignore[arg-type]
            train(model, steps)
        assert tracer.moved_to == (tmp_path / "run.1.parquet" if existing == "move_aside" else None)
    assert read(path).info.steps == 3
    assert read(tmp_path / "run.1.parquet").info.steps == 1
    with pytest.raises(RunExistsError), Tracer(make_model(), path):
        pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("way", ["function", "method", "before"])
def test_what_torch_would_compile_runs_eagerly_and_is_seen(tmp_path: Path, way: str) -> None:
    model = make_model()
    compiled: Any = torch.compile(model) if way == "before" else model
    compile_function = torch.compile
    with Tracer(None, tmp_path / "run.parquet") as tracer:
        if way == "function":
            compiled = torch.compile(model)
        if way == "method":
            model.compile()
        train(compiled)
    recorded = read(tmp_path / "run.parquet")
    assert len(recorded.where(tensor="output", module="0")) == 2
    assert torch.compile is compile_function
    from torch._dynamo import eval_frame

    assert eval_frame._stance.stance == "default"
    assert ["torch.compile ran eagerly" in note for note in tracer.info.notes] == [True]


def test_the_stance_that_the_user_had_set_comes_back_when_the_last_tracer_leaves(tmp_path: Path) -> None:
    from torch._dynamo import eval_frame

    with torch.compiler.set_stance("eager_on_recompile"):
        first = Tracer(None, tmp_path / "first.parquet").start()
        second = Tracer(None, tmp_path / "second.parquet").start()
        assert eval_frame._stance.stance == "force_eager"
        first.stop()
        assert eval_frame._stance.stance == "force_eager"
        second.stop()
        assert eval_frame._stance.stance == "eager_on_recompile"


def test_threads_append_their_rows_without_losing_any(tmp_path: Path) -> None:
    models = {f"model{n}": make_model() for n in range(3)}
    calls = 40

    def work(model: nn.Module) -> None:
        for _ in range(calls):
            model(torch.randn(5, 3)).sum().backward()

    with Tracer(models, tmp_path / "run.parquet") as tracer:
        tracer.step(0)
        threads = [threading.Thread(target=work, args=(model,)) for model in models.values()]
        for thread in threads:
            thread.start()
        for _ in range(20):
            tracer.step()
        for thread in threads:
            thread.join()
    recorded = read(tmp_path / "run.parquet")
    assert recorded.info.end == "completed"
    for name in models:
        assert len(recorded.where(tensor="output", module=f"{name}.0")) == calls
    assert [row["seq"] for row in recorded.rows] == list(range(len(recorded.rows)))


def test_a_tracer_that_has_stopped_keeps_no_model(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = make_model()
        with Tracer(model, tmp_path / "run.parquet") as tracer:
            train(model)
        dead = weakref.ref(model)
        del model
        assert dead() is None
        assert tracer.info.steps == 2
    finally:
        gc.enable()


def test_threads_that_finish_steps_at_once_keep_the_order(tmp_path: Path) -> None:
    with Tracer(None, tmp_path / "run.parquet", _on_device=True) as tracer:
        threads = [threading.Thread(target=train, args=(make_model(), 30)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tracer.info.end == "completed"
    recorded = read(tmp_path / "run.parquet")
    assert len(recorded.where(tensor="loss")) == 90
    numbers = [row["seq"] for row in recorded.rows]
    assert numbers == sorted(set(numbers))


def test_a_long_step_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.capture.steps._MOST_ROWS", 50)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        with torch.no_grad():
            for _ in range(30):
                model(torch.randn(5, 3))
        assert gradtrace.open_run(tracer.path).sql("select count(*) > 150 from records").rows == [(True,)]
        model(torch.randn(5, 3)).mean().backward()
        optimizer.step()
    recorded = read(tmp_path / "run.parquet")
    assert {row["step"] for row in recorded.rows} == {0}
    assert len({row["time"] for row in recorded.rows}) == 1
    assert (recorded.info.steps, len(recorded.where(phase="evaluation", module="", tensor="output"))) == (1, 30)


KILLED = """
import os, sys, torch
from torch import nn
from gradtrace.capture.tracer import Tracer

model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Tracer(model, sys.argv[1]).start()
for step in range(100):
    loss = model(torch.ones(1, 3)).sum()
    if step == 7:
        print("in flight", flush=True)
        sys.stdin.readline()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_killed_run_loses_no_more_than_the_step_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in flight\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    run = gradtrace.open_run(path)
    losses = run.sql("select step, count(*) from records where tensor = 'loss' group by 1 order by 1").rows
    assert losses == [(step, 1) for step in range(7)]
    states = run.sql("select step from records where phase = 'optimizer' and path = 'bias' order by 1").rows
    assert states == [(step,) for step in range(7)]
    assert first_nan(run).found is False


AT_EXIT = """
import atexit, sys, torch
from torch import nn
from gradtrace.capture import tracer as module
from gradtrace.trace.writer import RunWriter

class Small(RunWriter):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, rows_per_part=10, **kwargs)

module.RunWriter = Small
tracer = module.Tracer(None, sys.argv[1]).start()
model = nn.Linear(3, 2)

def late():
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
    tracer.stop("completed")

atexit.register(late)
"""


def test_training_in_an_exit_handler_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    done = subprocess.run([sys.executable, "-c", AT_EXIT, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    recorded = read(path)
    assert recorded.info.end == "completed"
    assert recorded.columns("step", tensor="loss") == [(step,) for step in range(5)]


def test_the_hooks_engine_finds_models_by_itself(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(None, tmp_path / "run.parquet", engine="hooks") as tracer:
        for _ in range(2):
            model(torch.randn(5, 3, requires_grad=True)).square().mean().backward()
            optimizer.step()
    recorded = read(tmp_path / "run.parquet")
    assert tracer.info.end == "completed"
    for step in range(2):
        places = recorded.columns("module", "call", "tensor", "path", step=step)
        boundaries = [place for place in places if place[2] in ("input", "output", "grad_output", "grad_input")]
        assert sorted(boundaries) == sorted(
            (module, 0, tensor, "0")
            for module in ("", "0", "1", "2")
            for tensor in ("input", "output", "grad_output", "grad_input")
        )
    assert all(not module._forward_hooks for module in model.modules())
