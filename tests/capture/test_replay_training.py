"""Trainings of many kinds: what a replay of their failing pass names, and that nothing of it shows."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.replaying import births, confirmations, events, line_of, rows_of, said_of
from torch import Tensor, nn

import gradtrace
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from gradtrace.trace.confirmation import OpDetail

pytestmark = pytest.mark.filterwarnings("ignore::gradtrace.errors.GradtraceWarning")

ONE, ZERO = torch.ones(3), torch.zeros(3)


class Root(nn.Module):
    """Square root: infinite slope at 0, nan below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sqrt()


def sgd(*modules: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr)


def first_birth(path: Path) -> tuple[str, str, str]:
    """Return op, module and tensor of the first birth."""
    return births(path)[0][:3]


# Which calls are behind an incident ----------------------------------------------------------------------------


def test_a_generators_call_waits_for_its_pass_while_the_discriminator_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    generator, discriminator = Root(), nn.Linear(3, 1)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)

    def train() -> None:
        for step in range(3):
            fake = generator(ZERO if step == 2 else ONE)
            of_discriminator.zero_grad()
            discriminator(torch.randn(3)).sum().backward()
            discriminator(fake.detach()).sum().backward()
            of_discriminator.step()
            of_generator.zero_grad()
            discriminator(fake).sum().backward()
            of_generator.step()

    path = tmp_path / "run.parquet"
    said = said_of(None, path, train)
    assert said.status == "reproduced", said.reason
    assert first_birth(path) == ("SqrtBackward0", "generator", "grad_input")
    ((step, _, words),) = events(path)
    assert step == 2
    assert words == "step 2: gradients not finite; first non-finite: generator, grad weight"
    assert rows_of(path, "SELECT DISTINCT step FROM records WHERE phase = 'replay'") == [(2,)]


def test_an_evaluation_in_grad_mode_piles_up_no_batches_and_hides_no_failing_pass(tmp_path: Path) -> None:
    model, batches, most = Root(), [], 0

    def train() -> None:
        nonlocal most
        for _ in range(200):
            x = torch.ones(3)
            batches.append(weakref.ref(x.untyped_storage()))
            model(x).sum()
            del x
            most = max(most, sum(batch() is not None for batch in batches))
        model(ZERO).sum().backward()

    path = tmp_path / "run.parquet"
    with gradtrace.trace(model, path):
        train()
    assert most <= 4
    assert [said.status for said in confirmations(path)] == ["reproduced"]
    assert first_birth(path) == ("SqrtBackward0", "", "grad_input")


def test_a_micro_step_in_the_middle_is_replayed_alone(tmp_path: Path) -> None:
    model = Root()
    optimizer = sgd(model, lr=0.0)

    def train() -> None:
        for x in (ONE, ZERO, ONE):
            model(x).sum().backward()
        optimizer.step()

    path = tmp_path / "run.parquet"
    assert said_of(model, path, train).status == "reproduced"
    query = "SELECT DISTINCT micro_step FROM records WHERE phase = 'replay' OR tensor = 'replay'"
    assert rows_of(path, query) == [(1,)]


def test_the_micro_step_of_a_birth_is_its_own_though_a_scaler_is_waited_for(tmp_path: Path) -> None:
    model = Root()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)

    def train() -> None:
        for x in (ONE, -ONE, ONE):
            scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    path = tmp_path / "run.parquet"
    assert said_of(model, path, train).status == "reproduced"
    assert first_birth(path) == ("SqrtBackward0", "", "output")
    assert rows_of(path, "SELECT DISTINCT micro_step FROM records WHERE phase = 'replay'") == [(1,)]
    assert torch.equal(model.weight, ONE)


def test_a_closure_that_fails_is_replayed_with_the_weights_of_that_moment(tmp_path: Path) -> None:
    model, batches = Root(), iter([ONE, ZERO, ONE, ONE])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(next(batches)).square().sum().sqrt()
        loss.backward()
        return loss

    path = tmp_path / "run.parquet"
    assert said_of(model, path, lambda: optimizer.step(closure)).status == "reproduced"


def test_encoder_and_decoder_are_replayed_each_with_what_arrived_at_it(tmp_path: Path) -> None:
    encoder, decoder, criterion = nn.Linear(3, 3), Root(), nn.MSELoss()

    def train() -> None:
        hidden = encoder(ONE) * 0
        criterion(decoder(hidden), decoder(ONE)).backward()

    path = tmp_path / "run.parquet"
    said = said_of({"encoder": encoder, "decoder": decoder, "criterion": criterion}, path, train)
    assert said.status == "reproduced", said.reason
    assert first_birth(path) == ("SqrtBackward0", "decoder", "grad_input")


def test_a_root_that_is_left_out_of_the_recording_is_replayed_all_the_same(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), second=Root()))
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    path = tmp_path / "run.parquet"
    with gradtrace.trace(model, path, include=["second"]):
        model(ONE[None]).sum().backward()
    assert [said.status for said in confirmations(path)] == ["reproduced"]
    assert first_birth(path) == ("SqrtBackward0", "second", "grad_input")
    assert rows_of(path, "SELECT DISTINCT module FROM records WHERE phase = 'backward'") == [("second",)]


def test_numbers_that_stay_on_an_accelerator_are_waited_for(tmp_path: Path) -> None:
    model, path = Root(), tmp_path / "run.parquet"
    with Tracer(model, path, _on_device=True):
        model(ZERO).sum().backward()
    assert [said.status for said in confirmations(path)] == ["reproduced"]


def test_another_thread_may_train_on_during_a_replay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other, path = Slow(), nn.Linear(3, 1), tmp_path / "run.parquet"
    over, trained = threading.Event(), threading.Event()

    def train_other() -> None:
        while not over.is_set():
            other(torch.randn(2, 3)).square().mean().backward()
            other.zero_grad()
            if model.calls > 1:  # the replay is running
                trained.set()

    optimizer = sgd(model)  # it counts the steps: none ends in the middle of the pass
    model.other = trained
    with gradtrace.trace({"model": model, "other": other}, path):
        thread = threading.Thread(target=train_other)
        thread.start()
        try:
            model(ZERO).sum().backward()
        finally:
            over.set()
            thread.join()
    assert trained.is_set()
    (said,) = confirmations(path)
    assert said.status == "reproduced", said.reason
    assert {birth[1] for birth in births(path)} == {"model"}
    assert optimizer.param_groups


class Slow(Root):
    """Waits in its second call for another thread's training."""

    calls = 0
    other: threading.Event

    def forward(self, x: Tensor) -> Tensor:
        Slow.calls += 1
        if Slow.calls > 1:
            assert self.other.wait(30)
        return super().forward(x)


# Models that are hard to run twice ------------------------------------------------------------------------------


class Forgetful(Root):
    """Gives a buffer away in each call instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps * 0.5 + 1
        return super().forward(x) + self.steps


def test_a_buffer_that_the_forward_replaces_is_there_again(tmp_path: Path) -> None:
    model = Forgetful()
    y = None

    def train() -> None:
        nonlocal y
        y = model(ZERO)
        after = model.steps
        y.sum().backward()
        assert model.steps is after

    assert said_of(model, tmp_path / "run.parquet", train).status == "reproduced"
    assert model.steps.tolist() == [1.0] * 3
    assert list(model._buffers) == ["steps"]


def test_a_call_with_other_weights_is_replayed_with_them(tmp_path: Path) -> None:
    model = Root()
    fast = torch.full((3,), -1.0, requires_grad=True)

    def train() -> None:
        torch.func.functional_call(model, {"weight": fast * 1.0}, (ONE,)).sum().backward()

    path = tmp_path / "run.parquet"
    assert said_of(model, path, train).status == "reproduced"
    assert first_birth(path) == ("SqrtBackward0", "", "output")
    assert torch.equal(model.weight, ONE)


class Bookkeeper(Root):
    """Keeps books in containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, list[float]] = {"a": []}
        self.seen: OrderedDict[int, list[int]] = OrderedDict()
        self.count: Counter[str] = Counter()
        self.groups: defaultdict[str, set[int]] = defaultdict(set)

    def forward(self, x: Tensor) -> Tensor:
        self.losses["a"].append(float(x.sum()))
        self.seen[len(self.seen)] = [1]
        self.count["calls"] += 1
        self.groups["k"].add(self.count["calls"])
        return super().forward(x)


def test_books_that_a_model_keeps_are_as_after_one_call(tmp_path: Path) -> None:
    model = Bookkeeper()
    assert said_of(model, tmp_path / "run.parquet", lambda: model(ZERO).sum().backward()).status == "reproduced"
    assert model.losses == {"a": [0.0]}
    assert model.seen == {0: [1]}
    assert model.count == {"calls": 1}
    assert model.groups == {"k": {1}}


def test_a_model_whose_weights_are_made_in_the_first_call_is_replayed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), Root())

    def train() -> None:
        model(torch.zeros(2, 3)).sum().backward()

    path = tmp_path / "run.parquet"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with gradtrace.trace(model, path) as tracer:
            train()
    assert tracer.info.end == "completed"


def test_a_frozen_model_that_was_made_in_inference_mode_is_no_trouble(tmp_path: Path) -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
            self.register_buffer("table", torch.zeros(70_000))

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x + self.table[:3]

    with torch.inference_mode():
        teacher = Teacher()
    student, path = Root(), tmp_path / "run.parquet"
    with gradtrace.trace({"teacher": teacher, "student": student}, path) as tracer:
        student(teacher(ZERO)).sum().backward()
    assert tracer.info.end == "completed"
    assert [said.status for said in confirmations(path)] == ["reproduced"]


@dataclass
class Batch:
    x: Tensor
    note: object = None


class Structured(Root):
    """Takes and gives what is no tensor, too."""

    def forward(self, batch: Batch, *, flag: object = None) -> dict[str, Any]:
        return {"y": super().forward(batch.x), "batch": batch, "flag": flag}


def test_structured_arguments_and_results_are_replayed(tmp_path: Path) -> None:
    model, encoder = Structured(), nn.Linear(3, 3)

    def train() -> None:
        model(Batch(encoder(ONE) * 0, object()), flag=lambda: 3)["y"].sum().backward()

    path = tmp_path / "run.parquet"
    said = said_of({"model": model, "encoder": encoder}, path, train)
    assert said.status == "reproduced", said.reason
    assert first_birth(path) == ("SqrtBackward0", "model", "grad_input")


def test_a_model_that_computes_its_loss_inside_is_named_with_its_line(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            loss = -(logits.softmax(-1)[labels] * 0).log()  # the loss
            return {"loss": loss, "logits": logits}

    model = WithLoss()
    path = tmp_path / "run.parquet"
    assert said_of(model, path, lambda: model(ONE, torch.tensor(1))["loss"].backward()).status == "reproduced"
    op, module, tensor, nan, posinf, neginf, detail = births(path)[0]
    assert (op, module, tensor, nan, posinf, neginf) == ("LogBackward0", "", "output", 0, 0, 1)
    innermost = OpDetail.from_json(detail).traceback[-1]
    assert innermost.line == line_of("# the loss", WithLoss)


def test_the_bad_term_of_a_loss_is_said_with_the_replay(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)

    def train() -> None:
        y = model(ONE)
        fit = y.square().mean()
        entropy = (y * 0).log().sum()
        (fit + 0.1 * entropy).backward()

    said = said_of(model, tmp_path / "run.parquet", train)
    assert said.term is not None
    assert "entropy" in said.term
    assert "fit" not in said.term


# Nothing of it shows --------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two outputs; batch norm and spectral norm change buffers that the second head's backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.root = nn.BatchNorm1d(3), Root()
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.root(x), self.last(self.norm(x + torch.randn_like(x)))


def two_passes() -> list[Any]:
    torch.manual_seed(0)
    model = TwoHeads()
    bad, good = model(torch.zeros(5, 3))
    bad.sum().backward()
    good.square().sum().backward()
    states = [p.grad.nan_to_num() for p in model.parameters()] + list(model.buffers()) + [torch.rand(2)]
    return [state.clone() for state in states] + [buffer._version for buffer in model.buffers()]


def test_a_second_pass_that_is_pending_during_a_replay_gives_the_same_bits(tmp_path: Path) -> None:
    plain = two_passes()
    with gradtrace.trace(None, tmp_path / "run.parquet"):
        traced = two_passes()
    assert [said.status for said in confirmations(tmp_path / "run.parquet")] == ["reproduced"]
    for one, other in zip(plain, traced, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


class Interrupted(nn.Module):
    """A Ctrl-C comes in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.root, self.calls = nn.BatchNorm1d(3), Root(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.randn(()) + self.norm(x).detach()
        if Interrupted.armed:
            Interrupted.armed = False
            raise KeyboardInterrupt
        return self.root(x) + noise

    armed = False


def test_an_interrupt_during_a_replay_comes_through_and_all_is_as_before(tmp_path: Path) -> None:
    model = Interrupted()
    with gradtrace.trace(model, tmp_path / "run.parquet"):
        loss = model(torch.zeros(2, 3)).sum()
        generator = torch.get_rng_state()
        before = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]
        Interrupted.armed = True
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        assert model.calls == 1
        assert torch.equal(generator, torch.get_rng_state())
        assert not torch.is_anomaly_enabled()
        for (buffer, value, version), now in zip(before, model.buffers(), strict=True):
            assert now is buffer
            assert torch.equal(now, value)
            assert now._version == version
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
    assert "__call__" in vars(nn.Module)
    assert nn.Module.__call__.__module__.startswith("torch")


def test_a_warning_of_the_models_is_shown_once_a_call_and_the_users_filters_stay(tmp_path: Path) -> None:
    class Warning_(Root):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("from the model", RuntimeWarning, stacklevel=1)
            return super().forward(x)

    model = Warning_()
    with warnings.catch_warnings(record=True) as shown, gradtrace.trace(model, tmp_path / "run.parquet"):
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        for x in (ZERO, ONE):
            model(x).sum().backward()
            model.zero_grad()
        assert list(warnings.filters) == filters
    assert [warning.category for warning in shown] == [RuntimeWarning, GradtraceWarning, RuntimeWarning]


def test_a_hook_of_the_users_that_raises_the_second_time_is_a_reason(tmp_path: Path) -> None:
    model, calls = Root(), iter([None])
    model.weight.register_hook(lambda gradient: next(calls))
    said = said_of(model, tmp_path / "run.parquet", lambda: model(ZERO).sum().backward())
    assert said.status == "not_replayed"
    assert said.reason is not None
    assert said.reason.startswith("running it again failed: StopIteration")
    assert first_birth(tmp_path / "run.parquet") == ("SqrtBackward0", "", "grad_input")


def test_the_graph_and_the_batch_die_with_the_step(tmp_path: Path) -> None:
    model, batches = Root(), []
    optimizer = sgd(model, lr=0.0)

    def step(value: float) -> None:
        x = torch.full((3,), value)
        batches.append(weakref.ref(x))
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.zero_grad()
        optimizer.step()

    with gradtrace.trace(model, tmp_path / "run.parquet"):
        for value in (1.0, 0.0, 1.0):
            step(value)
        gc.collect()
        assert [batch() for batch in batches] == [None] * 3
    assert [said.status for said in confirmations(tmp_path / "run.parquet")] == ["reproduced"]


Layer = Callable[[], nn.Module]
LAYERS: dict[str, Layer] = {
    "batch norm without momentum": lambda: nn.BatchNorm1d(3, momentum=None),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "new weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "random slopes": nn.RReLU,
    "encoder": lambda: nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_with_a_life_of_their_own_train_on_with_the_same_bits(layer: str, tmp_path: Path) -> None:
    def train() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(LAYERS[layer](), Absolute(), Root())
        optimizer, trail = sgd(model, lr=0.01), []
        for step in range(4):
            x = torch.randn(4, 3)
            loss = (model(x) if step != 2 else model(x) + model[2](torch.zeros(4, 3))).mean()
            optimizer.zero_grad()
            loss.backward()
            if step == 2:
                optimizer.zero_grad()
            optimizer.step()
            trail += [loss.detach(), torch.rand(()), *(t.detach().clone() for t in model.state_dict().values())]
            trail += [buffer._version for buffer in model.buffers()]
            trail.append([sorted(vars(module)) for module in model.modules()])
        return trail

    plain = train()
    with gradtrace.trace(None, tmp_path / "run.parquet"):
        traced = train()
    assert [said.status for said in confirmations(tmp_path / "run.parquet")] == ["reproduced"]
    for one, other in zip(plain, traced, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


class Absolute(nn.Module):
    """Keeps roots away from what has none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() + 1
