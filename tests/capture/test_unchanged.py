"""A traced training is the same training, to the last bit, and leaves torch as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor, nn

import gradtrace
from gradtrace.capture.options import Mode
from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.triggers import Triggers
from gradtrace.errors import RunExistsError

Outcome = dict[str, Any]


class Block(nn.Module):
    """A residual block that works in place wherever it can."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def residual_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(inplace=True),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).to(memory_format=torch.channels_last)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 4))


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Outcome:
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": [p.grad for p in model.parameters()],
        "optimizer": optimizer.state_dict()["state"],
        "random": torch.get_rng_state(),
    }


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, make: Callable[[], tuple[Tensor, Tensor]], **how: Any
) -> Outcome:
    """Train for a few steps: ``autocast``, ``scaler``, ``accumulate``, ``clip`` and ``evaluate`` as asked for."""
    losses = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2, enabled="scaler" in how)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(how.get("accumulate", 1)):
            inputs, target = make()
            with torch.autocast("cpu", how.get("autocast", torch.bfloat16), enabled="autocast" in how):
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2).float(), target.flatten())
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        if "clip" in how:
            scaler.unscale_(optimizer)
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), how["clip"]))
        scaler.step(optimizer)
        scaler.update()
        if "evaluate" in how:
            model.eval()
            with torch.no_grad():
                losses.append(model(make()[0]).sum())
            model.train()
    return outcome(model, optimizer, losses)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.randint(4, (4,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(20, (3, 7)), torch.randint(20, (3, 7))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randint(4, (8,))


def train_cnn(model: nn.Module) -> Outcome:
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), images, evaluate=True)


def train_transformer(model: nn.Module) -> Outcome:
    return steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), tokens, clip=0.5, evaluate=True)


def train_bfloat16(model: nn.Module) -> Outcome:
    return steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), tokens, autocast=torch.bfloat16)


def train_float16_scaled(model: nn.Module) -> Outcome:
    how = {"autocast": torch.float16, "scaler": True, "clip": 1.0}
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, **how)


def train_accumulating(model: nn.Module) -> Outcome:
    return steps(model, torch.optim.RMSprop(model.parameters(), lr=0.01), rows, accumulate=3, clip=1.0)


def train_foreach_fused(model: nn.Module) -> Outcome:
    return steps(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True), images)


def train_lbfgs(model: nn.Module) -> Outcome:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    inputs, target = rows()
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return outcome(model, optimizer, losses)


def train_double_backward(model: nn.Module) -> Outcome:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        inputs = rows()[0].requires_grad_()
        optimizer.zero_grad()
        value = model(inputs).square().mean()
        (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
        loss = value + (slope.norm() - 1).square()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return outcome(model, optimizer, losses)


TRAININGS = [
    (residual_cnn, train_cnn),
    (residual_cnn, train_foreach_fused),
    (Transformer, train_transformer),
    (Transformer, train_bfloat16),
    (mlp, train_float16_scaled),
    (mlp, train_accumulating),
    (mlp, train_lbfgs),
    (mlp, train_double_backward),
]
HOOKS_SAY_SO = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
NAMES = [train.__name__ for _, train in TRAININGS]


def run(
    build: Callable[[], nn.Module], train: Callable[[nn.Module], Outcome], tracer: Callable[[nn.Module], Any]
) -> Outcome:
    torch.manual_seed(7)
    model = build()
    with tracer(model):
        return train(model)


class Untraced:
    def __init__(self, model: nn.Module) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Compare nested results bit by bit, strides included."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        assert (
            torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
            if one.dim()
            else (one.item() == other.item() or (one != one and other != other))
        ), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}.{index}")
    else:
        assert one == other, where


@pytest.mark.parametrize("mode", ["full", "watch"])
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(("build", "train"), TRAININGS, ids=NAMES)
def test_training_is_the_same_to_the_last_bit(
    tmp_path: Path, build: Callable[[], nn.Module], train: Callable[[nn.Module], Outcome], on_device: bool, mode: Mode
) -> None:
    how: dict[str, Any] = {"mode": mode, "triggers": Triggers(first=1), "_on_device": on_device}
    plain = run(build, train, Untraced)
    traced = run(build, train, lambda model: Tracer(model, tmp_path / "run.parquet", **how))
    assert_same(plain, traced)
    info = gradtrace.open_run(tmp_path / "run.parquet").info
    assert (info.end, info.unmeasured.keys() - {"gradient never arrived (output unused, or changed in place)"}) == (
        "completed",
        set(),
    )


@HOOKS_SAY_SO
@pytest.mark.parametrize(
    ("build", "train"),
    [(mlp, train_accumulating), (mlp, train_float16_scaled), (mlp, train_lbfgs)],
    ids=["accumulating", "scaled", "lbfgs"],
)
def test_training_under_torchs_own_hooks_is_the_same_where_they_work(
    tmp_path: Path, build: Callable[[], nn.Module], train: Callable[[nn.Module], Outcome]
) -> None:
    plain = run(build, train, Untraced)
    traced = run(build, train, lambda model: Tracer(model, tmp_path / "run.parquet", engine="hooks"))
    assert_same(plain, traced)


def torch_functions() -> list[object]:
    return [
        nn.Module.__call__,
        torch.autograd._engine_run_backward,
        torch.amp.GradScaler.step,
        torch.compile,
        len(optimizer_module._global_optimizer_pre_hooks),
        len(optimizer_module._global_optimizer_post_hooks),
        len(nn.modules.module._global_forward_hooks),
        len(nn.modules.module._global_backward_hooks),
    ]


def things_on(model: nn.Module) -> list[object]:
    modules = [
        {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        for module in model.modules()
    ]
    parameters = [
        (p.requires_grad, p._backward_hooks, p._post_accumulate_grad_hooks, p.__dict__) for p in model.parameters()
    ]
    return [
        [sorted(m) for m in modules],
        [{k: len(v) for k, v in m.items() if k.endswith("hooks")} for m in modules],
        parameters,
    ]


@HOOKS_SAY_SO
@pytest.mark.parametrize("engine", ["graph", "hooks"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_behind(tmp_path: Path, engine: Any, error: type[BaseException] | None) -> None:
    model = mlp()
    functions, things = torch_functions(), things_on(model)

    def block() -> None:
        with Tracer(model, tmp_path / "run.parquet", engine=engine):
            assert torch_functions() != functions
            train_accumulating(model)
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(error):
            block()
    assert torch_functions() == functions
    assert things_on(model) == things
    info = gradtrace.open_run(tmp_path / "run.parquet").info
    assert info.end == ("completed" if error is None else f"exception {error.__name__}")
    assert info.steps == 4


@pytest.mark.parametrize("inner_first", [True, False])
def test_two_tracers_may_leave_in_any_order(tmp_path: Path, inner_first: bool) -> None:
    functions = torch_functions()
    plain = run(mlp, train_float16_scaled, Untraced)
    torch.manual_seed(7)
    model = mlp()
    outer = Tracer(model, tmp_path / "outer.parquet").start()
    inner = Tracer(model, tmp_path / "inner.parquet").start()
    traced = train_float16_scaled(model)
    for tracer in (inner, outer) if inner_first else (outer, inner):
        tracer.stop()
    assert torch_functions() == functions
    assert_same(plain, traced)
    runs = [gradtrace.open_run(tmp_path / f"{name}.parquet").info for name in ("outer", "inner")]
    assert [run.end for run in runs] == ["completed"] * 2
    assert runs[0].records == runs[1].records > 100


def test_what_somebody_else_has_wrapped_meanwhile_is_left_to_them(tmp_path: Path) -> None:
    original = torch.amp.GradScaler.step
    calls = []
    tracer = Tracer(None, tmp_path / "run.parquet").start()
    ours = torch.amp.GradScaler.step

    def theirs(self: torch.amp.GradScaler, *args: Any) -> Any:
        calls.append(args)
        return ours(self, *args)

    torch.amp.GradScaler.step = theirs
    try:
        tracer.stop()
        assert torch.amp.GradScaler.step is theirs
        train_float16_scaled(mlp())
        assert len(calls) == 4
        with Tracer(None, tmp_path / "second.parquet"):
            train_float16_scaled(mlp())
        assert gradtrace.open_run(tmp_path / "second.parquet").sql(
            "select count(*) from records where tensor = 'loss_scale'"
        ).rows == [(4,)]
    finally:
        torch.amp.GradScaler.step = ours
        with Tracer(None, tmp_path / "third.parquet"):
            pass
    assert torch.amp.GradScaler.step is original


def test_a_notebooks_cell_can_be_run_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    model = mlp()
    for _ in range(2):
        with gradtrace.trace(model, path, overwrite=True) as tracer:
            train_accumulating(model)
        assert gradtrace.open_run(tracer.path).info.steps == 4
    with pytest.raises(RunExistsError), gradtrace.trace(model, path):
        pass
    assert gradtrace.open_run(path).info.steps == 4


def test_tracing_warns_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(mlp, train_float16_scaled, lambda model: Tracer(model, tmp_path / "run.parquet"))
    assert caught == []
