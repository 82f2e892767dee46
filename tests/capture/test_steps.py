"""Which step, micro step and pass a record belongs to, for every way in which a training loop can count."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture.tracing import Recorded, read, record
from torch import Tensor, nn

from gradtrace.capture.clock import _OptimizerSearch
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import CaptureError

pytestmark = pytest.mark.usefixtures("no_optimizer_from_before")


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch() -> Tensor:
    return torch.ones(2, 3)


def counted(recorded: Recorded, **wanted: object) -> list[tuple[int, int]]:
    """Return step and micro step of the rows, in order."""
    return recorded.columns("step", "micro_step", **wanted)


def test_an_optimizer_ends_each_step(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(3):
            model(batch()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    recorded = record(model, tmp_path, train)
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (2, 0)]
    assert counted(recorded, tensor="lr") == [(0, 0), (1, 0), (2, 0)]
    assert {row["step"] for row in recorded.rows} == {0, 1, 2}
    assert (recorded.info.steps, recorded.info.last_step) == (3, 2)
    for step in range(3):
        assert len({row["time"] for row in recorded.where(step=step)}) == 1
    assert [row["seq"] for row in recorded.rows] == list(range(len(recorded.rows)))


def test_accumulated_passes_are_micro_steps(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            for _ in range(3):
                model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    expected = [(step, micro) for step in range(2) for micro in range(3)]
    assert counted(recorded, tensor="loss") == expected
    assert counted(recorded, tensor="output", module="") == expected
    assert counted(recorded, tensor="grad", module="0", path="weight") == expected


def test_several_passes_through_one_graph_are_numbered(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            loss = model(batch()).mean()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    passes = recorded.columns("step", "micro_step", "detail", tensor="loss")
    assert passes == [(0, 0, None), (0, 0, "pass 2"), (1, 0, None), (1, 0, "pass 2")]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_a_step_that_the_scaler_skips_is_counted_and_said(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def train() -> None:
        for scale in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            loss = model(batch()).mean() * scale
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    recorded = record(model, tmp_path, train)
    skip = recorded.only(phase="event")
    assert (skip["tensor"], skip["step"], skip["module"], skip["numel"]) == ("skip", 1, None, None)
    assert "GradScaler" in skip["detail"]
    scales = recorded.columns("step", "phase", "path", "max", tensor="loss_scale")
    assert scales == [(0, "optimizer", "0", 4.0), (1, "optimizer", "0", 8.0), (2, "optimizer", "0", 4.0)]
    assert counted(recorded, tensor="lr") == [(0, 0), (1, 0), (2, 0)]
    weights = recorded.columns("step", "norm", tensor="param", module="0", path="weight", phase="optimizer")
    assert [step for step, _ in weights] == [0, 1, 2]
    assert weights[0][1] == weights[1][1] != weights[2][1]


def gan(rounds: int, critic: int = 1) -> Callable[[], None]:
    generator, discriminator = make_model(1), nn.Linear(1, 1)
    second = torch.optim.SGD(generator.parameters(), lr=0.2)
    first = torch.optim.SGD(discriminator.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(rounds):
            for _ in range(critic):
                first.zero_grad()
                discriminator(generator(batch()).detach()).mean().backward()
                first.step()
            second.zero_grad()
            discriminator(generator(batch())).mean().backward()
            second.step()

    return train


def test_a_second_optimizer_belongs_to_the_step_of_the_first(tmp_path: Path) -> None:
    recorded = record(None, tmp_path, gan(3))
    assert counted(recorded, tensor="loss") == [(s, m) for s in range(3) for m in range(2)]
    assert recorded.columns("step", "path", tensor="lr") == [(s, f"{n}.0") for s in range(3) for n in range(2)]
    after = recorded.columns("step", "module", phase="optimizer", tensor="param", path="bias")
    generator = [f"generator.{n}" for n in (0, 2)]
    # That the generator has an optimizer of its own is not known before that one steps.
    assert [pair for pair in after if pair[0] > 0] == [(s, m) for s in (1, 2) for m in ("discriminator", *generator)]
    places = [
        (r["step"], r["micro_step"], r["module"], r["call"], r["tensor"], r["path"]) for r in recorded.boundaries()
    ]
    assert len(places) == len(set(places))
    assert [row["seq"] for row in recorded.rows] == list(range(len(recorded.rows)))
    for step in range(3):
        assert len({row["time"] for row in recorded.where(step=step)}) == 1


def test_a_critic_that_steps_several_times_makes_several_steps(tmp_path: Path) -> None:
    recorded = record(None, tmp_path, gan(2, critic=3))
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0), (5, 1)]


def test_an_optimizer_that_takes_over_for_good_counts_from_its_second_step(tmp_path: Path) -> None:
    model = make_model()
    warm_up = torch.optim.SGD(model.parameters(), lr=0.1)
    main = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        for optimizer in (warm_up, warm_up, main, main, main):
            model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    # The first step of the new one could be a generator's: it is counted to the step before.
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]
    states = recorded.columns("step", tensor="param", phase="optimizer", module="0", path="bias")
    assert states == [(0,), (1,), (1,), (2,), (3,)]


def test_models_built_one_after_the_other_share_no_step(tmp_path: Path) -> None:
    def train() -> None:
        for trial in range(8):
            model = make_model(trial)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.itself = optimizer  # alive until the garbage collector comes
            for _ in range(2):
                model(batch()).mean().backward()
                optimizer.step()

    gc.disable()
    try:
        recorded = record(None, tmp_path, train)
    finally:
        gc.enable()
    assert counted(recorded, tensor="loss") == [(step, 0) for step in range(16)]
    assert recorded.columns("step", "path", tensor="lr") == [(step, f"{step // 2}.0") for step in range(16)]
    first_states = recorded.columns("step", phase="input", tensor="param", path="bias")
    assert first_states == [(2 * trial,) for trial in range(8) for _ in range(2)]
    after = recorded.columns("step", phase="optimizer", tensor="param", path="bias")
    assert after == [(step,) for step in range(16) for _ in range(2)]


def test_an_optimizer_stepped_inside_backward_is_not_the_clock(tmp_path: Path) -> None:
    model = make_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]

    def train() -> None:
        for _ in range(3):
            model(batch()).mean().backward()
        for hook in hooks:  # the garbage collector does not see through them
            hook.remove()

    recorded = record(model, tmp_path, train)
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (2, 0)]
    assert counted(recorded, tensor="grad", module="0", path="bias") == [(0, 0), (1, 0), (2, 0)]
    for step_number in range(3):
        rates = recorded.columns("path", tensor="lr", step=step_number)
        assert sorted(rates) == [(f"{n}.0",) for n in range(4)]


def test_without_an_optimizer_a_forward_after_a_backward_starts_a_step(tmp_path: Path) -> None:
    model = make_model()
    norms = []

    def train() -> None:
        for _ in range(3):
            model(batch()).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            norms.append(model[0].bias.detach().double().norm().item())

    recorded = record(model, tmp_path, train)
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (2, 0)]
    after = recorded.columns("step", "norm", phase="optimizer", tensor="param", module="0", path="bias")
    assert [step for step, _ in after] == [0, 1, 2]
    assert [norm for _, norm in after] == pytest.approx(norms, rel=1e-6)


def test_without_any_backward_every_outermost_call_is_a_step(tmp_path: Path) -> None:
    model = make_model()

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(4):
                model(batch())

    recorded = record(model, tmp_path, evaluate)
    assert recorded.columns("step", "phase", tensor="output", module="") == [(s, "evaluation") for s in range(4)]
    assert recorded.info.steps == 4


def test_a_criterion_goes_on_with_the_pass_of_its_model(tmp_path: Path) -> None:
    model, criterion = make_model(), nn.MSELoss()

    def train() -> None:
        for _ in range(3):
            model.zero_grad()
            criterion(model(batch()), torch.zeros(2, 1)).backward()

    recorded = record(None, tmp_path, train)
    assert counted(recorded, tensor="output", module="") == [(0, 0), (1, 0), (2, 0)]
    assert counted(recorded, tensor="output", module="criterion") == [(0, 0), (1, 0), (2, 0)]
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (2, 0)]
    assert recorded.info.steps == 3


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_evaluation_after_the_last_step_is_part_of_it(tmp_path: Path, rounds: int) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(rounds):
            model(batch()).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                model(batch())

    recorded = record(model, tmp_path, train)
    assert recorded.info.steps == rounds
    assert counted(recorded, phase="evaluation", module="", tensor="output") == [(rounds - 1, 1)] * 2
    assert len({row["time"] for row in recorded.where(step=rounds - 1)}) == 1


def test_an_evaluation_before_training_is_part_of_the_first_step(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with torch.no_grad():
            for _ in range(3):
                model(batch())
        for _ in range(2):
            for _ in range(2):
                model(batch()).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(batch())

    recorded = record(model, tmp_path, train)
    assert counted(recorded, tensor="loss") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # The last one comes after all steps: it is counted to the step before it.
    assert recorded.columns("step", phase="evaluation", module="", tensor="output") == [(0,)] * 3 + [(1,), (1,)]


def test_an_optimizer_made_after_the_first_calls_still_ends_steps(tmp_path: Path) -> None:
    model = make_model()

    def train() -> None:
        with torch.no_grad():
            for _ in range(3):
                model(batch())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    losses = counted(recorded, tensor="loss")
    assert [micro for _, micro in losses] == [0, 1, 0, 1]
    assert losses[0][0] == losses[1][0] == losses[2][0] - 1


def test_a_closure_is_one_step_with_a_micro_step_for_each_evaluation(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    evaluations = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        evaluations[-1] += 1
        return loss

    def train() -> None:
        for _ in range(2):
            evaluations.append(0)
            optimizer.step(closure)

    recorded = record(model, tmp_path, train)
    expected = [(step, micro) for step, count in enumerate(evaluations) for micro in range(count)]
    assert len(expected) > 4
    assert counted(recorded, tensor="loss") == expected
    assert counted(recorded, tensor="param", phase="optimizer", module="0", path="bias") == [
        (step, expected_micro) for step, expected_micro in enumerate(count - 1 for count in evaluations)
    ]


def test_an_optimizer_inside_another_does_not_count(tmp_path: Path) -> None:
    model = make_model()

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {"lr": 1.0})
            self.inner = inner

        def step(self, closure: None = None) -> None:
            self.inner.step()

    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> None:
        for _ in range(3):
            model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train)
    assert counted(recorded, tensor="loss") == [(0, 0), (1, 0), (2, 0)]
    states = recorded.columns("step", tensor="param", phase="optimizer", module="0", path="bias")
    assert states == [(0,), (1,), (2,)]


@pytest.mark.parametrize("at_the_start", [True, False])
def test_a_loop_may_count_its_steps_itself(tmp_path: Path, at_the_start: bool) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        for _ in range(3):
            if at_the_start:
                tracer.step()
            for _ in range(2):
                model(batch()).mean().backward()
                optimizer.step()
            if not at_the_start:
                tracer.step()
    recorded = read(tmp_path / "run.parquet")
    losses = [step for step, _ in counted(recorded, tensor="loss")]
    # Counting at the end is noticed only there: the first loop's optimizer has counted by then.
    assert losses == ([0, 0, 1, 1, 2, 2] if at_the_start else [0, 1, 2, 2, 3, 3])
    buffers = recorded.columns("step", phase="optimizer", tensor="buffer", path="running_var")
    assert [step for (step,) in buffers] == losses


def test_a_loop_may_number_its_steps(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        for number in (100, 150, 151):
            tracer.step(number)
            model(batch()).mean().backward()
            optimizer.step()
    recorded = read(tmp_path / "run.parquet")
    assert counted(recorded, tensor="loss") == [(100, 0), (150, 0), (151, 0)]
    assert {row["step"] for row in recorded.rows} == {100, 150, 151}
    assert (recorded.info.steps, recorded.info.last_step) == (3, 151)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"first_step": 1000}, [1000, 1001, 1002, 1003, 1004, 1005]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 4}, [0, 4]),
        ({"steps": (2, 4)}, [2, 3]),
        ({"steps": (None, 2)}, [0, 1]),
        ({"steps": (4, None)}, [4, 5]),
        ({"steps": (1, 6), "every": 2}, [1, 3, 5]),
        ({"steps": (101, 103), "first_step": 100}, [101, 102]),
    ],
)
def test_only_the_steps_that_were_asked_for_are_recorded(
    tmp_path: Path, options: dict[str, object], expected: list[int]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []

    def train() -> None:
        for _ in range(6):
            states.append(model[0].bias.detach().double().norm().item())
            model(batch()).mean().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train, **options)
    first = int(options.get("first_step", 0))
    assert sorted({row["step"] for row in recorded.rows}) == list(range(first, first + 6))
    assert recorded.steps_in_full == expected
    assert recorded.info.captured == len(expected)
    for step in expected:
        assert len(recorded.where(step=step, tensor="loss")) == 1
        assert len(recorded.where(step=step, tensor="param", phase="optimizer")) == 4
        assert len(recorded.where(step=step, tensor="output")) == 4
    start = recorded.only(phase="input", tensor="param", module="0", path="bias")
    assert start["step"] == expected[0]
    assert start["norm"] == pytest.approx(states[expected[0] - first], rel=1e-6)


@pytest.mark.parametrize(("options", "expected"), [({"every": 2}, [0, 2]), ({"steps": (1, 2)}, [1])])
def test_a_step_of_two_optimizers_is_recorded_whole_or_not_at_all(
    tmp_path: Path, options: dict[str, object], expected: list[int]
) -> None:
    whole = record(None, tmp_path, gan(4))
    part = record(None, tmp_path, gan(4), **options)

    def without_start(recorded: Recorded, step: int) -> list[tuple[object, ...]]:
        return [
            (r["phase"], r["micro_step"], r["module"], r["call"], r["tensor"], r["path"])
            for r in recorded.where(step=step)
            if not (r["phase"] == "input" and r["tensor"] == "param")
        ]

    assert sorted({row["step"] for row in part.rows}) == [0, 1, 2, 3]
    assert part.steps_in_full == expected
    for step in expected:
        assert without_start(part, step) == without_start(whole, step)
    starts = part.columns("step", phase="input", tensor="param", path="bias")
    assert starts == [(expected[0],)] * 3


def test_a_schedule_is_seen_and_so_is_its_division_by_nothing(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rates = iter([0.25, math.nan, math.inf])

    def train() -> None:
        for _ in range(4):
            model(batch()).mean().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = next(rates, 0.0)

    recorded = record(model, tmp_path, train)
    columns = ("module", "phase", "numel", "nan_count", "posinf_count", "min", "max", "norm")
    assert recorded.columns(*columns, tensor="lr") == [
        (None, "optimizer", 1, 0, 0, 0.5, 0.5, 0.5),
        (None, "optimizer", 1, 0, 0, 0.25, 0.25, 0.25),
        (None, "optimizer", 1, 1, 0, None, None, None),
        (None, "optimizer", 1, 0, 1, None, None, None),
    ]


def test_every_group_and_a_rate_that_is_a_tensor_are_recorded(tmp_path: Path) -> None:
    model = make_model()
    groups = [
        {"params": model[0].parameters(), "lr": torch.tensor(0.5)},
        {"params": model[2].parameters(), "lr": 0.125},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)

    def train() -> None:
        model(batch()).mean().backward()
        optimizer.step()

    recorded = record(model, tmp_path, train)
    assert recorded.columns("path", "dtype", "max", tensor="lr") == [
        ("0.0", "float32", 0.5),
        ("0.1", "float64", 0.125),
    ]


def test_a_schedule_that_captures_nothing_is_refused() -> None:
    with pytest.raises(CaptureError, match="every=0"):
        Schedule(every=0)
    with pytest.raises(CaptureError, match="no step lies in 5:5"):
        Schedule(first=5, end=5)
    with pytest.raises(CaptureError, match="no step lies in 0:0"):
        Schedule(end=0)


def test_a_search_for_optimizers_holds_no_object_that_another_thread_is_building() -> None:
    # CPython refuses to finish a tuple that is built from a generator while somebody else refers to it.
    search, stop, raised = _OptimizerSearch(), threading.Event(), []

    def build() -> None:
        while not stop.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                raised.append(error)

    interval, builder = sys.getswitchinterval(), threading.Thread(target=build)
    sys.setswitchinterval(1e-5)
    builder.start()
    try:
        for _ in range(20):
            search.look_again()
            assert not search.exist()
    finally:
        stop.set()
        builder.join()
        sys.setswitchinterval(interval)
    assert raised == []
