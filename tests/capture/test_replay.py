"""The replay: what it names, that it leaves nothing behind, and each reason for which there is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture import replaying
from capture.replaying import births, confirmations, line_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace
from gradtrace.trace.confirmation import Confirmation, OpDetail

pytestmark = pytest.mark.filterwarnings("ignore::gradtrace.errors.GradtraceWarning")


class Distance(nn.Module):
    """Infinite slope where both inputs are equal: sqrt makes inf, pow turns it into nan."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).pow(2).sum(-1).sqrt()  # born here


class Everything(nn.Module):
    """Batch norm, dropout, in-place operations, both kinds of checkpointing, plain attributes that change."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
        self.distance = Distance()
        self.reentrant = reentrant
        self.calls = 0
        self.seen: list[float] = []

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 1.0
        x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.sum()))
        noise = torch.randn(()) + random.random() + float(np.random.rand())
        a, b = self.encode(x), self.encode(y)
        return self.distance(a, torch.where(x.sum(-1, keepdim=True) > 90, a.detach(), b)) * noise


def train(model: Everything, steps: int = 6, bad: int = 3) -> list[Any]:
    """Train such that step ``bad`` has nan gradients, which the loop drops; return all that could have changed."""
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trail: list[Any] = []
    for step in range(steps):
        x, y = torch.randn(5, 4), torch.randn(5, 4)
        if step == bad:
            x[0] = 100.0
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, y).mean()
        optimizer.zero_grad()
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if total.isfinite():
            optimizer.step()
        trail += [loss.item(), total.item(), random.random(), np.random.rand(), torch.rand(()).item()]
        trail += [tensor.detach().clone() for tensor in model.state_dict().values()]
        trail += [buffer._version for buffer in model.buffers()]
        trail += [model.calls, list(model.seen), model.training]
    return trail


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_replay_is_reproduced_and_nothing_of_it_shows(tmp_path: Path, reentrant: bool) -> None:
    torch.manual_seed(0)
    plain_model = Everything(reentrant=reentrant)
    plain = train(plain_model)
    torch.manual_seed(0)
    model = Everything(reentrant=reentrant)
    with gradtrace.trace(model, tmp_path / "run.parquet"):
        traced = train(model)
    assert len(plain) == len(traced)
    for one, other in zip(plain, traced, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)
    (said,) = confirmations(tmp_path / "run.parquet")
    assert said.status == "reproduced", said.reason
    assert said.anomaly_op == "PowBackward0"
    op, module, tensor, nan, posinf, neginf, detail = births(tmp_path / "run.parquet")[0]
    assert (op, module, tensor, nan, neginf) == ("SqrtBackward0", "distance", "grad_input", 0, 0)
    assert posinf >= 1
    innermost = OpDetail.from_json(detail).traceback[-1]
    assert (innermost.file, innermost.line) == (__file__, line_of("born here", Distance))


# What keeps a pass from being replayed -------------------------------------------------------------------------


class Broken(nn.Module):
    """Its backward makes inf where the input is 1; ``before`` runs first in each forward."""

    def __init__(self, before: Callable[[Broken, Tensor], Any] = lambda module, x: None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.before = before
        self.memory = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.before(self, x)
        return (self.weight * x - 1).pow(2).sqrt()


def one_pass(model: nn.Module, x: Tensor | None = None) -> None:
    model(torch.ones(4) if x is None else x).sum().backward()


def said_of(model: nn.Module, path: Path, run: Callable[[], Any] | None = None, **options: Any) -> Confirmation:
    return replaying.said_of(model, path, run or (lambda: one_pass(model)), **options)


def test_a_broken_backward_is_reproduced_when_nothing_is_in_the_way(tmp_path: Path) -> None:
    assert said_of(Broken(), tmp_path / "run.parquet").status == "reproduced"


def test_a_forward_that_communicates_is_not_replayed(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Broken(lambda module, x: torch.distributed.all_reduce(torch.ones(1)))
        said = said_of(model, tmp_path / "run.parquet")
    finally:
        torch.distributed.destroy_process_group()
    assert said.status == "not_replayed"
    assert said.reason is not None
    assert "communicates" in said.reason
    assert "allreduce" in said.reason


def test_a_forward_that_writes_into_its_own_memory_is_not_replayed(tmp_path: Path) -> None:
    model = Broken(lambda module, x: module.memory.add_(1.0))
    said = said_of(model, tmp_path / "run.parquet")
    assert said.status == "not_replayed"
    assert said.reason is not None
    assert "add_" in said.reason
    assert model.memory.tolist() == [1.0] * 4


def test_a_forward_with_a_generator_of_its_own_is_not_reproduced(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    class Noisy(Broken):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(4, generator=generator)

    said = said_of(Noisy(), tmp_path / "run.parquet")
    assert said.status == "not_reproduced"
    assert said.reason is not None
    assert "output 0 of the root" in said.reason


def test_a_batch_that_the_forward_changes_is_not_replayed(tmp_path: Path) -> None:
    said = said_of(Broken(lambda module, x: x.mul_(1.0)), tmp_path / "run.parquet")
    assert said.status == "not_replayed"
    assert said.reason == "weights or arguments were changed in place after the forward began"


def test_weights_that_change_during_backward_are_not_replayed(tmp_path: Path) -> None:
    model = Broken()

    def update(parameter: Tensor) -> None:
        parameter.detach().mul_(2.0)

    model.weight.register_post_accumulate_grad_hook(update)
    said = said_of(model, tmp_path / "run.parquet")
    assert said.reason == "weights or arguments were changed in place after the forward began"


def test_a_loss_that_is_differentiated_twice_is_not_replayed(tmp_path: Path) -> None:
    model = Broken()

    def penalty() -> None:
        x = torch.ones(4, requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + slope.sum()).backward()

    said = said_of(model, tmp_path / "run.parquet", penalty)
    assert said.status == "not_replayed"
    assert said.reason == "the loss was differentiated more than once"


def test_a_pass_with_many_root_calls_is_not_replayed(tmp_path: Path) -> None:
    model = Broken()
    optimizer = torch.optim.SGD(model.parameters())

    def unrolled() -> None:
        torch.stack([model(torch.ones(4)).sum() for _ in range(40)]).sum().backward()
        optimizer.step()

    said = said_of(model, tmp_path / "run.parquet", unrolled)
    assert said.reason == "the pass has 40 root calls; at most 32 are kept"


def test_large_output_gradients_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.capture.replay.kept.MOST_GRADIENT_BYTES", 8)
    said = said_of(Broken(), tmp_path / "run.parquet")
    assert said.status == "not_replayed"
    assert said.reason is not None
    assert said.reason.startswith("the gradient of output 0 has more than")


def test_out_of_memory_is_a_reason_and_no_error(tmp_path: Path) -> None:
    def second_time(module: Broken, x: Tensor) -> None:
        if module.memory is None:
            raise torch.OutOfMemoryError("no more")
        module.memory = None

    model = Broken(second_time)
    said = said_of(model, tmp_path / "run.parquet")
    assert (said.status, said.reason) == ("not_replayed", "out of memory")


def test_a_model_that_fails_the_second_time_is_a_reason_and_no_error(tmp_path: Path) -> None:
    calls = iter([None])
    said = said_of(Broken(lambda module, x: next(calls)), tmp_path / "run.parquet")
    assert said.status == "not_replayed"
    assert said.reason == "running it again failed: StopIteration: "


def test_a_replaced_forward_is_not_replayed(tmp_path: Path) -> None:
    model = Broken()

    def run() -> None:
        y = model(torch.ones(4))
        model.forward = lambda x: x  # type: ignore[method-assign]
        y.sum().backward()

    said = said_of(model, tmp_path / "run.parquet", run)
    assert said.reason == "the module's forward was replaced after the call"


def test_replays_can_be_switched_off(tmp_path: Path) -> None:
    said = said_of(Broken(), tmp_path / "run.parquet", replays=0)
    assert (said.status, said.reason) == ("not_replayed", "replays were switched off")


def test_each_boundary_is_replayed_once_and_the_last_replay_is_for_what_will_not_heal(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: Broken() for name in "abc"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        for name in "aabc":
            model[name](torch.ones(4)).sum().backward()
            optimizer.zero_grad()
            optimizer.step()
            model[name](-torch.ones(4)).sum().backward()  # a step that heals
            optimizer.zero_grad()
            optimizer.step()

    path = tmp_path / "run.parquet"
    said_of(model, path, run, replays=2)
    assert [(said.status, said.reason) for said in confirmations(path)] == [
        ("reproduced", None),
        ("not_replayed", "the same boundary was replayed at step 0"),
        ("reproduced", None),
        ("not_replayed", "2 of 2 replays were used by then"),
    ]


def test_the_last_replay_is_not_spent_on_what_may_heal(tmp_path: Path) -> None:
    model = Broken()

    def forward_only() -> None:
        model(torch.full((4,), float("nan")))

    said = said_of(model, tmp_path / "run.parquet", forward_only, replays=1)
    assert (said.status, said.reason) == (
        "not_replayed",
        "the last replay is kept back for an incident that does not heal",
    )


def test_an_obstacle_costs_no_replay(tmp_path: Path) -> None:
    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        for step in range(3):
            x = torch.ones(4) if step != 1 else -torch.ones(4)
            y = model(x)
            if step == 0:
                with torch.no_grad():
                    model.weight.mul_(1.0)
            y.sum().backward()
            optimizer.zero_grad()
            optimizer.step()

    path = tmp_path / "run.parquet"
    said_of(model, path, run, replays=2)
    assert [(said.status, said.reason) for said in confirmations(path)] == [
        ("not_replayed", "weights or arguments were changed in place after the forward began"),
        ("reproduced", None),
    ]


def test_what_was_computed_without_a_gradient_has_no_call_to_replay(tmp_path: Path) -> None:
    model = Broken()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.full((4,), float("nan")))

    said = said_of(model, tmp_path / "run.parquet", evaluate)
    assert (said.status, said.reason) == ("not_replayed", "no call of the model in grad mode is behind it")


def test_the_engine_hooks_says_that_it_keeps_nothing(tmp_path: Path) -> None:
    model = Broken()
    batch = torch.ones(4, requires_grad=True)
    said = said_of(model, tmp_path / "run.parquet", lambda: one_pass(model, batch), engine="hooks")
    assert (said.status, said.reason) == (
        "not_replayed",
        "the engine hooks keeps nothing of a pass; the engine graph does",
    )


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_part_is_a_reason(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)), Broken())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for scale in (0.0, 1.0):
            optimizer.zero_grad()
            ((model(torch.arange(8.0).reshape(2, 4)) - 1).sqrt() * scale).sum().backward()
            optimizer.zero_grad()
            optimizer.step()

    said = said_of(model, tmp_path / "run.parquet", run)
    assert said.status == "not_replayed"
    assert said.reason is not None
    assert said.reason.startswith("a part of the model is scripted (torch.jit): it cannot run on copies of its buffers")


def test_a_gradient_that_the_script_has_spoilt_is_none_of_the_pass(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        model(torch.ones(1, 2)).sum().backward()
        model.weight.grad = torch.full((1, 2), float("inf"))
        optimizer.step()

    said = said_of(model, tmp_path / "run.parquet", run)
    reason = "the gradients were finite when they arrived: another rank's came in, or the script changed them"
    assert (said.status, said.reason) == ("not_replayed", reason)


def test_weights_that_are_not_finite_any_more_are_not_replayed(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))

    def run() -> None:
        for _ in range(2):  # the first step's update makes them infinite
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    path = tmp_path / "run.parquet"
    said = said_of(model, path, run)
    assert (said.status, said.reason) == ("not_replayed", "the weights were not finite any more")


def test_a_model_of_dtensors_is_not_replayed(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Broken()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        said = said_of(model, tmp_path / "run.parquet")
    finally:
        torch.distributed.destroy_process_group()
    assert (said.status, said.reason) == ("not_replayed", "the model's parameters are sharded (DTensor)")


def test_an_argument_that_cannot_be_looked_into_is_a_reason_and_no_error(tmp_path: Path) -> None:
    class Lazy(dict[str, Tensor]):
        def items(self) -> Any:
            raise KeyError("gone")

    class Takes(Broken):
        def forward(self, x: Tensor, options: Any = None) -> Tensor:
            return super().forward(x)

    model = Takes()
    said = said_of(
        model, tmp_path / "run.parquet", lambda: model(torch.ones(4), Lazy(a=torch.ones(1))).sum().backward()
    )
    assert said.status == "not_replayed"
    assert said.reason == "KeyError while looking into an argument of the model"
