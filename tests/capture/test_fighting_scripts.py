"""Scripts that get in the way of a recording: they train on as without it, and what it misses is counted and said."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.fx.traceback
import torch.nn.modules.module as module_hooks
import torch.optim.optimizer as optimizer_hooks
from torch import Tensor, nn

from gradtrace.capture import calls, hooks, optimizers, steps
from gradtrace.capture.operations.stacks import without_own_frames
from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.triggers import Triggers
from gradtrace.trace.sent import let_pass, sent
from tests.capture.fights import FIGHTS, Net, Training, clear_hooks, saved_bytes
from tests.capture.tracing import assert_holds, record

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "watch": {"mode": "watch", "triggers": Triggers(first=1)},
    "hooks": {"engine": "hooks"},
}
NOT_UNDER_HOOKS = {
    "copies_and_saves_in_the_middle",  # a copy has the hooks, and cannot be pickled
    "sets_anomaly_mode_itself",  # the stack that it prints has a frame more of torch's for each hooked call
    "counts_what_is_asked_of_its_tensors",  # torch's full backward hooks ask, too
}
CASES = [(name, mode) for name in FIGHTS for mode in MODES if mode != "hooks" or name not in NOT_UNDER_HOOKS]


def outcome_of(fight: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return in_bytes(fight())


def in_bytes(value: Any) -> Any:
    """Return nested results such that two that are equal are equal bit by bit."""
    if isinstance(value, Tensor):
        plain = value.detach().as_subclass(Tensor).contiguous()
        return str(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(key, in_bytes(item)) for key, item in value.items()]
    return [in_bytes(item) for item in value] if isinstance(value, (list, tuple)) else value


def torchs_functions() -> list[Any]:
    return [
        nn.Module.__call__,
        torch.autograd._engine_run_backward,
        torch.amp.GradScaler.step,
        torch.amp.GradScaler.scale,
        torch.compile,
        torch.set_anomaly_enabled,
        torch.is_anomaly_enabled,
        torch.fx.traceback.format_stack,
        torch.utils.data.DataLoader.__iter__,
        sys.getrecursionlimit(),
        sys.excepthook,
        torch.is_anomaly_enabled(),
        torch.is_grad_enabled(),
        list(optimizer_hooks._global_optimizer_pre_hooks),
        list(optimizer_hooks._global_optimizer_post_hooks),
        list(module_hooks._global_forward_hooks),
        list(module_hooks._global_backward_hooks),
    ]


@pytest.fixture(scope="module")
def untraced() -> dict[str, Any]:
    """What comes of each training without a recording, as it is asked for."""
    return {}


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning", "ignore::gradtrace.errors.GradtraceWarning"
)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_training_is_the_same_and_nothing_is_left_behind(
    name: str, mode: str, untraced: dict[str, Any], tmp_path: Path
) -> None:
    if name not in untraced:
        untraced[name] = outcome_of(FIGHTS[name])
    functions = torchs_functions()
    traced: list[Any] = []
    recorded = record(None, tmp_path, lambda: traced.append(outcome_of(FIGHTS[name])), **MODES[mode])
    assert torchs_functions() == functions
    assert traced == [untraced[name]]
    assert recorded.info.end == "completed"
    assert len({row["step"] for row in recorded.where(tensor="loss")}) >= 1


# What is seen, and what is said of the rest ------------------------------------------------------------------------


def test_the_values_are_those_after_the_scripts_own_hooks(tmp_path: Path) -> None:
    t, left = Training(), []
    t.model.fc1.register_forward_hook(lambda module, args, result: result * 1.5)
    handle = module_hooks.register_module_forward_hook(lambda module, args, result: left.append((module, result)))
    try:
        recorded = record(t.model, tmp_path, t.step)
    finally:
        handle.remove()
    seen = {module: result for module, result in left if module is not t.model.fc1}
    assert_holds(recorded.only(module="act", tensor="output"), seen[t.model.act])
    assert_holds(recorded.only(module="bn", tensor="output"), seen[t.model.bn])
    scaled = recorded.only(module="fc1", tensor="output")["norm"]
    assert scaled == pytest.approx(1.5 * dict(left)[t.model.fc1].norm().item())
    assert recorded.only(module="act", tensor="input")["norm"] == scaled


def test_hooks_of_all_optimizers_that_the_script_clears_are_there_again_and_it_is_said(tmp_path: Path) -> None:
    recorded = record(None, tmp_path, FIGHTS["clears_the_optimizers_hooks"])
    assert recorded.info.steps == 4
    assert recorded.info.unmeasured == {optimizers.CLEARED: 2}
    assert [row["step"] for row in recorded.where(tensor="lr")] == [0, 1, 2, 3]


def test_an_optimizer_whose_steps_nobody_announces_ends_steps_all_the_same(tmp_path: Path) -> None:
    class Quiet(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.1 * parameter.grad

    t = Training()
    t.optimizer = Quiet(t.model.parameters())
    Quiet.step = Quiet.step.__wrapped__  # type: ignore[attr-defined,method-assign]

    def train() -> None:
        for _ in range(2):  # accumulated: the weights stay as they are
            t.model(torch.randn(8, 6)).sum().backward()
        t.optimizer.step()
        t.step()
        t.step()

    recorded = record(t.model, tmp_path, train)
    assert recorded.info.steps == 3
    assert [(row["step"], row["micro_step"]) for row in recorded.where(tensor="loss")] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
    ]


def test_calls_that_the_script_leads_past_the_recording_are_counted(tmp_path: Path) -> None:
    t, present = Training(), nn.Module.__call__

    def train() -> None:
        t.step()
        with mock.patch.object(nn.Module, "__call__", present):
            t.step()
            t.step()
        t.step()

    recorded = record(t.model, tmp_path, train)
    assert recorded.info.unmeasured == {steps.REPLACED: 2}
    assert [row["step"] for row in recorded.where(module="fc1", tensor="output")] == [0, 3]
    assert [row["step"] for row in recorded.where(module="fc1", tensor="grad", path="bias")] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_on_modules_that_the_script_clears_are_counted_and_leave_no_call_open(tmp_path: Path) -> None:
    t = Training()

    def train() -> None:
        t.step()
        t.model._forward_hooks.clear()
        t.step()
        clear_hooks(t.model.fc2)
        t.step()

    recorded = record(t.model, tmp_path, train, engine="hooks")
    assert recorded.info.unmeasured == {hooks.CLEARED: 2}
    assert recorded.info.steps == 3
    steps_of = {
        name: [row["step"] for row in recorded.where(module=name, tensor="output")] for name in ("", "fc1", "fc2")
    }
    assert steps_of == {"": [0], "fc1": [0, 1, 2], "fc2": [0, 1]}
    assert {row["call"] for row in recorded.where(module="fc1")} - {None} == {0}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_no_hook_is_left_in_a_dictionary_that_the_script_has_put_there(tmp_path: Path) -> None:
    t = Training()

    def train() -> None:
        t.step()
        for module in t.model.modules():
            module._forward_hooks = type(module._forward_hooks)(module._forward_hooks)
        t.step()

    record(t.model, tmp_path, train, engine="hooks")
    assert [len(module._forward_hooks) for module in t.model.modules()] == [0] * 6


def test_gradients_of_tensors_that_were_swapped_are_seen(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)

    def train() -> None:
        model(torch.tensor([[1.0, 2.0]])).sum().backward()
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(1, 2)))
        model(torch.tensor([[3.0, 4.0]])).sum().backward()

    recorded = record(model, tmp_path, train)
    gradients = [(row["min"], row["max"]) for row in recorded.where(tensor="grad", path="weight")]
    assert gradients == [(1.0, 2.0), (3.0, 4.0)]


# Exceptions of the script's own that come up in gradtrace's code ---------------------------------------------------


class Late(Exception):
    """What a script's own timer raises."""


@contextmanager
def handler_that_raises(kind: type[Exception]) -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise kind("time is up")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", [Late, TimeoutError, RuntimeError])
@pytest.mark.parametrize(
    "where", ["on_host.read", "statistics.Kind", "rows.RowBuffer.take", "clock.Clock.backward_ended"]
)
def test_what_a_handler_of_the_script_raises_reaches_the_script(
    kind: type[Exception], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the middle of gradtrace's code: at each of the first calls of a function of it."""
    t, waits, arrived, sent_off = Training(), [0], 0, 0

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent_off
            waits[0] -= 1
            if waits[0] == 0:
                sent_off += 1
                signal.raise_signal(signal.SIGALRM)
            return function(*args, **kwargs)

        return call

    owner, _, name = f"gradtrace.capture.{where}".rpartition(".")
    target = (
        pytest.importorskip(owner)
        if owner.count(".") == 2
        else getattr(sys.modules[owner.rpartition(".")[0]], owner.rpartition(".")[2])
    )
    monkeypatch.setattr(target, name, interrupted(getattr(target, name)))

    def train() -> None:
        nonlocal arrived
        for count in range(1, 40, 3):
            waits[0] = count
            try:
                t.step()
            except kind as error:
                assert str(error) == "time is up"
                arrived += 1
            assert torch.is_grad_enabled()
        waits[0] = -1
        t.step()

    with handler_that_raises(kind):
        recorded = record(t.model, tmp_path, train)
    assert arrived == sent_off > 0
    assert recorded.info.end == "completed"
    last = max(row["step"] for row in recorded.rows)
    assert len(recorded.where(step=last, tensor="output", module="fc1")) >= 1
    assert recorded.where(step=last, tensor="input", module="")[0]["call"] == 0


def test_no_call_is_left_open_wherever_a_handler_of_the_script_raises_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, waits, arrived = nn.Linear(2, 1), 0, 0

    def grad_mode() -> bool:
        nonlocal waits
        waits -= 1
        is_on = torch.is_grad_enabled()
        if waits == 0:
            signal.raise_signal(signal.SIGALRM)
        return is_on

    monkeypatch.setattr(calls, "_grad_mode", grad_mode)
    with handler_that_raises(Late), Tracer(model, tmp_path / "run.parquet") as tracer:
        for count in range(1, 5):
            waits = count
            try:
                model(torch.ones(1, 2))
            except Late:
                arrived += 1
            assert tracer._calls.innermost_open() is None
    assert arrived >= 3


def test_only_what_a_handler_or_another_thread_has_raised_is_meant_for_the_script() -> None:
    def caught(function: Callable[[], Any]) -> BaseException:
        with pytest.raises(Exception) as raised:
            function()
        return raised.value

    with handler_that_raises(Late):
        late = caught(lambda: signal.raise_signal(signal.SIGALRM))

    def wrapped() -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        except OSError as error:
            raise ValueError("cannot write") from error

    with handler_that_raises(TimeoutError):
        consequence = caught(wrapped)
    assert sent(late) is late
    assert isinstance(sent(consequence), TimeoutError)
    assert sent(caught(lambda: 1 / 0)) is None
    assert sent(caught(lambda: FIGHTS[3])) is None  # type: ignore[index]
    interrupt = KeyboardInterrupt()
    assert sent(interrupt) is interrupt


def test_arguments_that_cannot_be_compared_are_not_taken_for_a_handlers_frame() -> None:
    def of_the_scripts(*values: Any) -> None:
        raise ValueError("of the script's own container")

    with pytest.raises(ValueError) as raised:
        of_the_scripts(numpy.ones(3))
    assert sent(raised.value) is None


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_a_handler_raises_is_shown_with_what_the_script_knows_of_it(is_wrapped: bool) -> None:
    def handler(number: int, frame: Any) -> None:
        try:
            FIGHTS["no such fight"]
        except KeyError:
            raise Late("time is up")  # noqa: B904 - the KeyError is to be shown, too

    def of_gradtraces() -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        except Late as error:
            if is_wrapped:
                raise OSError("cannot write") from error
            raise

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Late) as raised:
            try:
                of_gradtraces()
            except Exception as error:
                let_pass(error)
    finally:
        signal.signal(signal.SIGALRM, before)
    context = raised.value.__context__
    assert isinstance(context, KeyError) and not raised.value.__suppress_context__
    assert context.__context__ is None


# Leftovers ---------------------------------------------------------------------------------------------------------


def test_checkpoints_are_the_same_bytes_as_without_a_recording(tmp_path: Path) -> None:
    def saved() -> list[bytes]:
        torch.manual_seed(3)
        t = Training()
        schedule = torch.optim.lr_scheduler.StepLR(t.optimizer, 1)
        t.step()
        schedule.step()
        return [saved_bytes(each) for each in (t.model, t.model.state_dict(), t.optimizer, schedule, vars(t))]

    plain = saved()
    for mode in ("full", "watch"):
        traced: list[bytes] = []
        record(None, tmp_path, lambda into=traced: into.extend(saved()), **MODES[mode])
        assert traced == plain
    assert not any(b"gradtrace" in data for data in plain)


def test_a_stack_of_anomaly_mode_loses_gradtraces_frames_and_those_outside_of_the_script() -> None:
    import gradtrace.capture.script as runner

    def frame(file: str) -> str:
        return f'  File "{file}", line 1, in f\n    code\n'

    files = ["/usr/bin/gradtrace", runner.__file__, "train.py", Tracer.start.__code__.co_filename, "model.py"]
    assert without_own_frames([frame(file) for file in files]) == [frame("train.py"), frame("model.py")]


@pytest.mark.parametrize("inner", [Net, None], ids=["another model", "the same model"])
def test_a_tracer_inside_of_another_records_the_same(inner: Any, tmp_path: Path) -> None:
    def nested(path: Path | None) -> list[Any]:
        torch.manual_seed(1)
        t = Training()
        other = Training(inner()) if inner else t
        if path is not None:
            first = Tracer(t.model, path / "first.parquet").start()
        t.step()
        if path is not None:
            second = Tracer(other.model, path / "second.parquet", **MODES["watch"]).start()
        other.step()
        t.step()
        if path is not None:
            first.stop()
        other.step()
        if path is not None:
            second.stop()
            assert (first.info.end, second.info.end) == ("completed", "completed")
        return in_bytes(t.outcome())

    functions = torchs_functions()
    assert nested(tmp_path) == nested(None)
    assert torchs_functions() == functions
