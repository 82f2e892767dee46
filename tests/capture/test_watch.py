"""Steps that are only watched: what they leave, and that an incident in one is as good as one captured in full."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture.replaying import confirmations, events
from capture.tracing import BOUNDARIES, Recorded, Row, record
from torch import Tensor, nn

from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.states import SHARES
from gradtrace.capture.watch.triggers import Triggers
from gradtrace.errors import CaptureError

BAD = 7
"""The step in which things go wrong."""
AT_ONCE = Triggers(first=0, after=0)
"""Captures no step of itself."""


class Block(nn.Module):
    """Fails in the way that it is told, in the step that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.relu(self.a(x)))
        if self.fails == "forward":
            y = y / (y - y)
        if self.fails == "backward":
            y = (y - y.detach()).sqrt() + y
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.block = Block()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.norm(self.first(x))))


def training(kind: str, steps: int = BAD + 1) -> Callable[[], None]:
    """Return a training that fails in step ``BAD`` in one of several ways."""

    def train() -> None:
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(steps):
            fails = kind if step == BAD else ""
            model.block.fails = fails
            x, target = torch.randn(8, 6), torch.randn(8, 3)
            if fails == "input":
                x[2, 1] = math.nan
            if fails == "learning rate":
                optimizer.param_groups[0]["lr"] = math.nan
            output = model(x)
            loss = F.mse_loss(output, target)
            if fails == "loss":
                loss = loss + (output - output).pow(2).sum(-1).log().mean()
            if fails == "backward of the loss":
                loss = loss + (output - output).pow(2).sum(-1).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def both(kind: str, path: Path, steps: int = BAD + 1) -> tuple[Recorded, Recorded]:
    """Record the same training in full and watched; both come to the same numbers."""
    with pytest.warns(match="not finite"):
        whole = record(None, path, training(kind, steps))
    with pytest.warns(match="not finite"):
        watched = record(None, path, training(kind, steps), mode="watch", triggers=AT_ONCE)
    return whole, watched


def boundaries(recorded: Recorded, step: int) -> list[tuple[Any, ...]]:
    """Return what was seen at the boundaries of a step, in order."""
    names = ("micro_step", "phase", "module", "call", "tensor", "path", "dtype", "shape", "nan_count")
    numbers = ("posinf_count", "neginf_count", "min", "max", "norm")
    rows = [row for row in recorded.where(step=step) if row["tensor"] in BOUNDARIES and row["op"] is None]
    return [tuple(row[name] for name in names + numbers) for row in rows]


def places(rows: list[Row]) -> set[tuple[Any, ...]]:
    return {(row["step"], row["phase"], row["module"], row["tensor"], row["path"]) for row in rows}


def bad_rows(recorded: Recorded, *tensors: str) -> list[Row]:
    rows = [row for row in recorded.rows if row["tensor"] in tensors and row["op"] is None]
    return [row for row in rows if row["nan_count"] or row["posinf_count"] or row["neginf_count"]]


# Healthy steps -----------------------------------------------------------------------------------------------


def test_a_watched_step_leaves_its_loss_its_rate_and_the_norm_of_all_gradients(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms, losses = [], []

    def train() -> None:
        for _ in range(4):
            loss = model(torch.randn(8, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            squares = [p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None]
            norms.append(math.sqrt(math.fsum(squares)))
            losses.append(loss.item())
            optimizer.step()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    assert recorded.columns("step", "phase", "module", "tensor", "path") == [
        (step, *row)
        for step in range(4)
        for row in (
            ("loss", None, "loss", ""),
            ("backward", None, "grad_norm", ""),
            ("optimizer", None, "lr", "0.0"),
        )
    ]
    assert [row["norm"] for row in recorded.where(tensor="grad_norm")] == pytest.approx(norms, rel=1e-6)
    assert [row["max"] for row in recorded.where(tensor="loss")] == losses
    assert (recorded.info.steps, recorded.info.captured, recorded.info.incidents) == (4, 0, 0)


def test_the_norm_of_gradients_whose_squares_vanish_is_right(tmp_path: Path) -> None:
    model = nn.Linear(50, 50)
    norms = []

    def train() -> None:
        for scale in (1e-22, 1e-22, 1e-22, 1.0, 1.0):
            model.zero_grad()
            (model(torch.randn(4, 50)) * scale).sum().backward()
            norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    assert [row["norm"] for row in recorded.where(tensor="grad_norm")] == pytest.approx(norms, rel=1e-4)


def test_the_norm_of_gradients_whose_squares_overflow_is_right_and_no_incident(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def train() -> None:
        (model(torch.full((4, 3), 1e10)) * 1e15).sum().backward()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    expected = math.sqrt(6 * (4e25) ** 2 + 2 * (4e15) ** 2)
    assert recorded.only(tensor="grad_norm")["norm"] == pytest.approx(expected, rel=1e-5)
    assert not recorded.where(tensor="grad")
    assert recorded.info.incidents == 0


def test_modules_inside_are_not_looked_at(tmp_path: Path) -> None:
    model = Net()
    recorded = record(
        model, tmp_path, lambda: model(torch.randn(8, 6)).sum().backward(), mode="watch", triggers=AT_ONCE
    )
    calls = {module.name: module.calls for module in recorded.info.modules}
    assert calls == {"": 1, "first": 0, "norm": 0, "block": 0, "block.a": 0, "block.b": 0, "last": 0}


def test_nothing_is_hooked_onto_parameters(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    with Tracer(model, tmp_path / "run.parquet", mode="watch", triggers=Triggers(first=1)):
        for hooks in (1, 1, 0, 0):  # after the first step another optimizer might have one that belongs to it
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            assert [_hooks_of(node) for node in nodes] == [hooks] * 2
            optimizer.step()


def _hooks_of(node: Any) -> int:
    """Return how many hooks run before a node, by letting each count itself out."""
    handle = node.register_prehook(lambda gradients: None)
    number = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return number


# Incidents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "backward", "input", "loss", "backward of the loss"])
def test_an_incident_leaves_all_that_a_captured_step_leaves(tmp_path: Path, kind: str) -> None:
    whole, watched = both(kind, tmp_path)
    assert boundaries(watched, BAD) == boundaries(whole, BAD)
    assert places(bad_rows(watched, "grad", "loss")) == places(bad_rows(whole, "grad", "loss"))
    assert not [row for row in watched.boundaries() if row["step"] != BAD]
    assert [c.status for c in confirmations(tmp_path / "run.parquet")] == ["reproduced"]
    assert watched.info.incidents == 1


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_gradients_stand_where_they_arrived(tmp_path: Path, kind: str) -> None:
    whole, watched = both(kind, tmp_path)

    def order(recorded: Recorded) -> list[tuple[Any, ...]]:
        rows = [row for row in recorded.where(step=BAD, phase="backward") if row["tensor"] != "grad_norm"]
        return [(row["module"], row["tensor"], row["path"], row["nan_count"], row["norm"]) for row in rows]

    assert order(watched) == order(whole)


def test_weights_that_an_update_has_ruined_belong_to_that_step(tmp_path: Path) -> None:
    whole, watched = both("learning rate", tmp_path, BAD + 2)
    of_update = [place for place in places(bad_rows(watched, "param")) if place[0] == BAD]
    assert set(of_update) == {place for place in places(bad_rows(whole, "param")) if place[0] == BAD}
    assert len(of_update) == len(list(Net().parameters()))
    said = confirmations(tmp_path / "run.parquet")
    assert [(c.status, c.reason) for c in said] == [("not_replayed", "the weights were not finite any more")]


def test_a_weight_that_the_script_has_written_belongs_to_the_step_that_uses_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    model[1].bias[0] = math.inf
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()

    with pytest.warns(match="not finite"):
        recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    first = bad_rows(recorded, "param", "output", "loss", "grad")[0]
    assert (first["step"], first["phase"], first["module"], first["path"]) == (2, "forward", "1", "bias")


def test_a_weight_that_nothing_uses_is_found_within_a_few_steps(tmp_path: Path) -> None:
    model = nn.ModuleDict({str(n): nn.Linear(2, 2, bias=False) for n in range(SHARES * 2)})
    optimizer = torch.optim.SGD(model["0"].parameters(), lr=0.1)

    def train() -> None:
        for step in range(2 * SHARES + 4):
            if step == 4:
                model["13"].weight.data.fill_(math.nan)
            model["0"](torch.randn(4, 2)).sum().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    found = recorded.where(tensor="param")
    assert {(row["module"], row["nan_count"], row["phase"]) for row in found} == {("13", 4, "optimizer")}
    assert 4 <= found[0]["step"] < 4 + SHARES
    # Once found it is in every step, so that the incident goes on.
    assert [row["step"] for row in found] == list(range(found[0]["step"], 2 * SHARES + 4))
    assert recorded.info.incidents == 1


def test_a_weight_that_the_last_update_has_ruined_is_found_when_the_recording_ends(tmp_path: Path) -> None:
    model = nn.ModuleDict({str(n): nn.Linear(2, 2, bias=False) for n in range(SHARES * 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            if step == 2:
                model["13"].weight.grad = torch.full((2, 2), 1e38)
                optimizer.param_groups[0]["lr"] = 1e10
            model["0"](torch.zeros(4, 2)).sum().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    found = recorded.where(tensor="param")
    assert [(row["step"], row["module"], row["neginf_count"], row["phase"]) for row in found] == [
        (2, "13", 4, "optimizer")
    ]
    assert recorded.info.incidents == 1


def test_a_buffer_is_seen_in_the_step_that_ruins_it(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("mask", torch.full((2,), -math.inf))

        def forward(self, x: Tensor, step: int) -> Tensor:
            self.mean += math.inf if step == 2 else 1.0
            return self.layer(x)

    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(4):
            model(torch.randn(4, 3), step).sum().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    assert recorded.columns("step", "phase", "path", "posinf_count", "neginf_count", tensor="buffer") == [
        (0, "input", "mask", 0, 2),  # infinite from the start
        (0, "optimizer", "mask", 0, 2),
        (1, "optimizer", "mask", 0, 2),
        (2, "optimizer", "mean", 2, 0),
        (2, "optimizer", "mask", 0, 2),
        (3, "optimizer", "mean", 2, 0),
        (3, "optimizer", "mask", 0, 2),
    ]


def test_an_evaluation_is_watched_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def train() -> None:
        model(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            model(torch.full((4, 3), math.nan))

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    row = recorded.only(tensor="output")
    assert (row["phase"], row["nan_count"]) == ("evaluation", 8)


# What is replayed ---------------------------------------------------------------------------------------------


def test_a_step_that_comes_out_otherwise_is_not_filled_in(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        """Draws from a generator of its own, which nobody can put back."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.own = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.rand(x.shape, generator=self.own))

    model = Noisy()

    def train() -> None:
        (model(torch.randn(4, 3)).sum() * 1e38 * 1e38).backward()

    with pytest.warns(match="not finite"):
        recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    (said,) = confirmations(tmp_path / "run.parquet")
    assert said.status == "not_reproduced"
    assert "output 0 of the root" in str(said.reason)
    assert not recorded.boundaries()


def test_several_outputs_of_which_one_is_made_of_another(tmp_path: Path) -> None:
    class Two(nn.Module):
        """Uses its first output for the second: what comes back from there is no gradient from outside."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.layer(x)
            return logits, logits.square().sum() + (self.layer.bias * 0).sqrt().sum()

    def train() -> None:
        torch.manual_seed(0)
        logits, loss = Two()(torch.randn(4, 3))
        (loss + 3 * logits.sum()).backward()

    with pytest.warns(match="not finite"):
        whole = record(None, tmp_path, train)
    with pytest.warns(match="not finite"):
        watched = record(None, tmp_path, train, mode="watch", triggers=AT_ONCE)
    assert boundaries(watched, 0) == boundaries(whole, 0)
    assert watched.only(phase="backward", tensor="grad_output", module="", path="0")["max"] == 3.0


def test_the_lines_between_the_model_and_backward_are_named_when_none_was_noted(tmp_path: Path) -> None:
    both("backward of the loss", tmp_path)
    (said,) = confirmations(tmp_path / "run.parquet")
    lines = str(said.reason).partition(f"{Path(__file__)}:")[2].partition(",")[0]
    first, last = (int(number) for number in lines.split(" to "))
    source = Path(__file__).read_text().splitlines()
    assert source[first - 1].strip() == "output = model(x)"
    assert source[last - 1].strip() == "loss.backward()"


# Other loops --------------------------------------------------------------------------------------------------


def test_accumulated_gradients_are_looked_at_after_each_pass(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []

    def train() -> None:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())))
        optimizer.step()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    found = recorded.columns("step", "micro_step", "norm", tensor="grad_norm")
    assert [row[:2] for row in found] == [(0, 0), (0, 1), (0, 2)]
    assert [row[2] for row in found] == pytest.approx(norms, rel=1e-6)


def test_gradients_that_autograd_grad_returns_are_looked_at(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def train() -> None:
        for factor in (1.0, math.inf):
            gradients = torch.autograd.grad((model(torch.ones(4, 3)) * factor).sum(), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0 * gradient.nan_to_num()

    with pytest.warns(match="not finite"):
        recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    norms = [row["norm"] for row in recorded.where(tensor="grad_norm")]
    assert norms[0] == pytest.approx(math.sqrt(6 * 16 + 2 * 16), rel=1e-6)
    assert {row["path"] for row in recorded.where(tensor="grad")} == {"weight", "bias"}
    last = recorded.where(tensor="grad_norm")[1]
    assert (last["min"], last["max"], last["norm"], last["posinf_count"]) == (None, None, None, 1)


def test_an_optimizer_that_steps_inside_of_backward_hides_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]

    def train() -> None:
        for step in range(4):
            x = torch.full((2, 3), 1e38 if step == 3 else 1.0)
            (model(x).sum() * (1e10 if step == 3 else 1.0)).backward()

    with pytest.warns(match="not finite"):
        recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    for handle in handles:
        handle.remove()
    assert bad_rows(recorded, "grad")
    assert len(recorded.where(tensor="grad_norm")) >= 2


def test_a_step_that_a_scaler_skips_is_no_incident(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train() -> None:
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((4, 3), 1e36 if step == 1 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    recorded = record(model, tmp_path, train, mode="watch", triggers=AT_ONCE)
    assert recorded.info.incidents == 0
    assert [row["step"] for row in recorded.where(tensor="skip")] == [1]
    assert recorded.columns("max", tensor="loss_scale") == [(1024.0,), (1024.0,), (512.0,)]


# The schedule -------------------------------------------------------------------------------------------------


def test_the_steps_after_an_incident_are_captured_in_full(tmp_path: Path) -> None:
    with pytest.warns(match="not finite"):
        recorded = record(None, tmp_path, training("input", 16), mode="watch", triggers=Triggers(first=2, after=3))
    # The weights are ruined for good, so the incident goes on; what was captured because of it is three steps.
    in_full = [step for step in range(16) if recorded.where(step=step, tensor="output", module="block.a")]
    assert in_full == [0, 1, BAD, BAD + 1, BAD + 2, BAD + 3]
    switches = [(step, words) for step, tensor, words in events(tmp_path / "run.parquet") if tensor == "switch"]
    assert switches == [
        (0, "captured in full from step 0: the first 2 steps"),
        (2, "watched from step 2"),
        (BAD + 1, f"captured in full from step {BAD + 1}: an incident began in step {BAD}"),
        (BAD + 4, f"watched from step {BAD + 4}"),
    ]
    assert recorded.info.captured == 5


def test_a_learning_rate_that_jumps_is_looked_at_closely(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 1e-3 if step < 4 else 1e-2
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()

    recorded = record(model, tmp_path, train, mode="watch", triggers=Triggers(first=1, after=2))
    assert recorded.steps_in_full == [0, 5, 6]


def test_a_model_other_than_that_of_the_baseline_is_looked_at_longer(tmp_path: Path) -> None:
    def train(width: int) -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def run() -> None:
            for _ in range(8):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()

        return run

    record(None, tmp_path, train(3))
    (tmp_path / "run.parquet").rename(tmp_path / "before.parquet")
    how = {"mode": "watch", "triggers": Triggers(first=2, changed_first=6), "baseline": tmp_path / "before.parquet"}
    assert record(None, tmp_path, train(3), **how).steps_in_full == [0, 1]
    assert record(None, tmp_path, train(4), **how).steps_in_full == [0, 1, 2, 3, 4, 5]


def test_steps_that_were_asked_for_are_captured_whatever_the_schedule_says(tmp_path: Path) -> None:
    recorded = record(None, tmp_path, training("", 10), mode="watch", triggers=Triggers(first=1), steps=(4, 6))
    assert recorded.steps_in_full == [0, 4, 5]


@pytest.mark.parametrize(
    ("options", "words"), [({"mode": "peek"}, "no such mode: 'peek'"), ({"mode": "watch", "engine": "hooks"}, "needs")]
)
def test_a_mode_that_cannot_be(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        Tracer(None, tmp_path / "run.parquet", **options)
