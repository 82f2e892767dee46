"""Module calls: which are seen, in which phase, and that being seen changes nothing about them."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gradtrace.capture import interception
from gradtrace.capture.tracer import Tracer
from tests.capture.tracing import Recorded, assert_holds, read, record


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.linspace(-1, 1, 6).view(2, 3)


def step(model: nn.Module) -> None:
    model(X).sum().backward()


def assert_whole(recorded: Recorded, **where: Any) -> None:
    """Check that the recording ended well and holds exactly one call of every module of ``net``."""
    assert recorded.info.end == "completed"
    for module in ("", "0", "1", "2"):
        assert len(recorded.where(module=module, tensor="output", **where)) == 1, module
        assert len(recorded.where(module=module, tensor="grad_output", **where)) == 1, module


# Phases ------------------------------------------------------------------------------------------------------


def test_evaluation_inside_of_training_has_its_own_phase_and_count(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model)
            with torch.no_grad():
                model(X)
                model(X)
            with torch.inference_mode():
                model(X)
            optimizer.step()

    recorded = record(model, tmp_path, run)
    assert recorded.info.steps == 2
    for number in (0, 1):
        assert_whole(
            Recorded(recorded.where(step=number, phase="forward") + recorded.where(phase="backward"), recorded.info),
            step=number,
        )
        for module in ("", "0", "1", "2"):
            for tensor in ("input", "output"):
                calls = recorded.columns("call", step=number, module=module, tensor=tensor, phase="evaluation")
                assert calls == [(0,), (1,), (2,)], (module, tensor)
        assert {row["micro_step"] for row in recorded.where(step=number)} == {0}
    assert {row["module"] for row in recorded.where(phase="input", tensor="input")} == {""}


def test_what_another_root_computed_is_no_batch(tmp_path: Path) -> None:
    encoder, head, criterion = nn.Linear(3, 2), nn.Linear(2, 2), nn.MSELoss()

    def run() -> None:
        criterion(head(encoder(X)), torch.zeros(2, 2)).backward()

    recorded = record({"encoder": encoder, "head": head, "criterion": criterion}, tmp_path, run)
    phases = recorded.columns("module", "path", "phase", tensor="input")
    assert phases == [
        ("encoder", "0", "input"),
        ("head", "0", "forward"),
        ("criterion", "0", "forward"),
        ("criterion", "1", "input"),
    ]
    assert_holds(recorded.only(module="criterion", tensor="grad_input"), head(encoder(X)) * 2 / 4)
    assert recorded.info.unmeasured == {}


# Exceptions --------------------------------------------------------------------------------------------------


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.error is not None:
            raise self.error
        return hidden


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_calls_that_raise_leave_nothing_open(kind: type[BaseException], tmp_path: Path) -> None:
    error = kind()
    model = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), raises=Raises(error), last=nn.Linear(3, 1)))

    def run() -> None:
        with pytest.raises(kind) as caught:
            model(X)
        assert caught.value is error
        model.raises.error = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        optimizer.step()

    recorded = record(model, tmp_path, run)
    assert recorded.info.end == "completed"
    last = recorded.where(module="", tensor="input")
    assert [row["phase"] for row in last] == ["input", "input"]  # outermost again
    assert len(recorded.where(module="raises", tensor="output")) == 1
    assert len(recorded.where(module="raises", tensor="grad_input")) == 1


def test_a_module_that_catches_what_its_child_raises_goes_on(tmp_path: Path) -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.other = Raises(ValueError()), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.child(x)
            except ValueError:
                x = x * 2
            return self.other(x)

    model = Catches()
    recorded = record(model, tmp_path, lambda: model(X).sum().backward())
    assert recorded.columns("module", tensor="output") == [("child.inner",), ("other",), ("",)]
    assert recorded.only(module="other", tensor="input")["phase"] == "forward"


def test_an_interrupt_while_inputs_are_measured_leaves_nothing_open(tmp_path: Path) -> None:
    model = net()
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        measure = tracer._session.see

        def interrupted(*args: Any, **kwargs: Any) -> None:
            tracer._session.see = measure  # type: ignore[method-assign]
            raise KeyboardInterrupt

        step(model)
        tracer._session.see = interrupted  # type: ignore[assignment,method-assign]
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert tracer._calls._thread.stack == []
        step(model)
    assert tracer.info.end == "completed"


def test_generators_and_coroutines_are_no_open_calls(tmp_path: Path) -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for _ in range(3):
                x = self.layer(x)
                yield x

    model, other = Streams(), nn.Linear(3, 1)

    def run() -> None:
        stream = model(X)
        other(next(stream))
        next(stream)
        stream.close()

    recorded = record({"model": model, "other": other}, tmp_path, run)
    assert recorded.columns("module", "phase", tensor="input") == [
        ("model", "input"),
        ("model.layer", "input"),
        ("other", "forward"),
        ("model.layer", "forward"),
    ]


# What cannot be measured -------------------------------------------------------------------------------------


def around(transform: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    """Return a function that runs ``transform`` between two steps of training."""

    def run(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model)
        optimizer.step()
        transform(model)
        step(model)
        optimizer.step()

    return run


def vmapped(model: nn.Module) -> None:
    assert torch.vmap(model)(X).shape == (2, 2)


def func_grad(model: nn.Module) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (X,)).sum()

    gradients = torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()})
    assert torch.equal(gradients["2.bias"], torch.full((2,), 2.0))


def jit_trace(model: nn.Module) -> None:
    traced = torch.jit.trace(model, X, check_trace=False)
    assert torch.equal(traced(X), model(X))


def jit_script(model: nn.Module) -> None:
    assert torch.equal(torch.jit.script(model)(X), model(X))


def fx_trace(model: nn.Module) -> None:
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(X), model(X))


def exported(model: nn.Module) -> None:
    assert torch.allclose(torch.export.export(model, (X,)).module()(X), model(X))


def exported_strictly(model: nn.Module) -> None:
    assert torch.allclose(torch.export.export(model, (X,), strict=True).module()(X), model(X))


def fake(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(X)).shape == (2, 2)


def meta(model: nn.Module) -> None:
    assert copy.deepcopy(model).to("meta")(X.to("meta")).shape == (2, 2)
    functional = torch.func.functional_call
    parameters = {k: v.to("meta") for k, v in model.named_parameters()}
    assert functional(model, parameters, (X.to("meta"),)).device.type == "meta"


TRANSFORMS = [vmapped, func_grad, jit_trace, jit_script, fx_trace, exported, exported_strictly, fake, meta]


@pytest.mark.parametrize("found", [False, True], ids=["named", "found"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*:UserWarning", "ignore::FutureWarning")
def test_transforms_work_and_break_nothing(transform: Callable[[nn.Module], None], found: bool, tmp_path: Path) -> None:
    plain, model = net(), net()
    around(transform)(plain)
    recorded = record(None if found else model, tmp_path, lambda: around(transform)(model))
    assert recorded.info.end == "completed"
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(recorded.where(step=0, module="0", tensor="grad_output")) == 1
    assert len(recorded.where(step=1, module="0", tensor="grad_output")) == 1
    assert not any(row["device"] == "meta" for row in recorded.rows)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_models_run_eagerly_and_the_recording_says_so(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        step(torch.compile(model))

    recorded = record(model, tmp_path, run)
    assert_whole(recorded)
    assert any("torch.compile ran eagerly" in note for note in recorded.info.notes)


def test_tensors_without_values_are_counted(tmp_path: Path) -> None:
    model = nn.ReLU()
    recorded = record(model, tmp_path, lambda: (model(X.to("meta")), model(X)))
    assert len(recorded.where(tensor="output")) == 1
    assert recorded.info.unmeasured == {"meta tensor": 2}


# Modes of the user -------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(torch.overrides.resolve_name(func) or str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_class", [Ops, Functions])
def test_a_mode_of_the_user_sees_only_the_training(mode_class: type[Ops | Functions], tmp_path: Path) -> None:
    plain, model = net(), net()
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    with mode_class() as alone:
        plain(x).sum().backward()
    with Tracer(model, tmp_path / "run.parquet"), mode_class() as watched:
        model(other).sum().backward()
    recorded = read(tmp_path / "run.parquet")
    assert_whole(recorded)
    assert watched.seen == alone.seen


def test_flops_are_the_same(tmp_path: Path) -> None:
    plain, model = net(), net()
    with FlopCounterMode(display=False) as alone:
        step(plain)
    with FlopCounterMode(display=False) as watched:
        recorded = record(model, tmp_path, lambda: step(model))
    assert watched.get_total_flops() == alone.get_total_flops() > 0
    assert_whole(recorded)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        torch.set_default_device("meta")
        try:
            step(model)
        finally:
            torch.set_default_device(None)

    recorded = record(model, tmp_path, run)
    assert_whole(recorded)
    assert recorded.info.unmeasured == {}


# The models stay what they are -------------------------------------------------------------------------------


def test_the_encoder_layer_keeps_its_fast_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    outputs: list[Tensor] = []

    def run() -> None:
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
            outputs.append(layer(x))
        assert "aten::_transformer_encoder_layer_fwd" in {event.key for event in seen.key_averages()}

    run()
    recorded = record(layer, tmp_path, run)
    assert torch.equal(outputs[0], outputs[1])
    assert_holds(recorded.only(module="", tensor="output"), outputs[0])


def test_a_traced_model_can_be_saved_and_copied(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        step(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        copied = copy.deepcopy(model)
        for twin in (loaded, copied):
            assert torch.equal(twin(X), model[2](model[1](model[0](X))))
            twin(X).sum().backward()

    recorded = record(model, tmp_path, run)
    assert len(recorded.where(module="", tensor="output")) == 1
    assert len(recorded.where(module="0", tensor="grad_output")) == 1
    assert recorded.info.unmeasured == {}


def test_a_copy_that_is_found_goes_by_its_own_name(tmp_path: Path) -> None:
    def run() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = copy.deepcopy(model)
        for _ in range(2):
            step(model)
            optimizer.step()
            with torch.no_grad():
                average(X)
        step(model)

    recorded = record(None, tmp_path, run)
    outputs = recorded.columns("module", "phase", tensor="output", path="0", shape="[2, 2]")
    assert {name for name, phase in outputs if phase == "forward"} == {"", "2"}
    assert {name for name, phase in outputs if phase == "evaluation"} == {"average", "average.2"}


def test_nothing_is_written_onto_the_modules(tmp_path: Path) -> None:
    model = net()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with Tracer(model, tmp_path / "run.parquet"):
        step(model)
        during = {name: set(vars(module)) for name, module in model.named_modules()}
    assert during == before


# Threads -----------------------------------------------------------------------------------------------------


def test_threads_do_not_mix(tmp_path: Path) -> None:
    class Slow(nn.Module):
        """Waits in the middle of its call until the other thread is in the middle of its own."""

        def __init__(self, barrier: threading.Barrier) -> None:
            super().__init__()
            self.barrier, self.inner, self.last = barrier, nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                self.barrier.wait(10)
                x = self.inner(x)
            return self.last(x)

    barrier = threading.Barrier(2)
    models = {"one": Slow(barrier), "two": Slow(barrier)}
    failures: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            model(X).sum().backward()
        except BaseException as error:
            failures.append(error)

    def run() -> None:
        threads = [threading.Thread(target=work, args=(model,)) for model in models.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    recorded = record(models, tmp_path, run)
    assert failures == []
    for name in models:
        assert [row["phase"] for row in recorded.where(module=name, tensor="input")] == ["input"]
        assert len(recorded.where(module=f"{name}.inner", tensor="output")) == 20
        assert len(recorded.where(module=f"{name}.inner", tensor="grad_output")) == 20
        assert len(recorded.where(module=f"{name}.inner", tensor="grad_input")) == 19
        mine = [row for row in recorded.boundaries() if row["module"].startswith(name) and row["phase"] != "backward"]
        assert mine[0]["module"] == name and mine[-1]["module"] == name


# Modules that come and go ------------------------------------------------------------------------------------


def test_modules_added_during_the_run_are_named_and_recorded(tmp_path: Path) -> None:
    model = net()

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model)
        optimizer.step()
        model.append(nn.Linear(2, 1))
        step(model)

    recorded = record(model, tmp_path, run)
    assert recorded.columns("step", module="3", tensor="output") == [(1,)]
    assert recorded.columns("step", module="3", tensor="grad_output") == [(1,)]
    assert recorded.info.modules[-1].name == "3"


def test_modules_that_a_forward_builds_for_itself_are_found_at_once(tmp_path: Path) -> None:
    class Builds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "one"):
                self.one = nn.Linear(3, 3)
            x = self.one(x)
            if not hasattr(self, "two"):
                self.two = nn.Linear(3, 1)
            return self.two(x)

    model = Builds()
    recorded = record(model, tmp_path, lambda: step(model))
    assert recorded.columns("module", tensor="output") == [("one",), ("two",), ("",)]


def test_a_module_made_anew_in_each_call_costs_one_search_and_is_counted(tmp_path: Path) -> None:
    class Anew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(10):
                x = nn.Softmax(dim=-1)(self.layer(x))
            return x

    model = Anew()
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        searches = 0
        refresh = tracer._session.names.refresh

        def counted(*args: Any) -> None:
            nonlocal searches
            searches += 1
            refresh(*args)

        tracer._session.names.refresh = counted  # type: ignore[method-assign]
        model(X).sum().backward()
    assert searches <= 2
    assert tracer.info.unmeasured == {"call of a module that is registered nowhere in its model": 10}
    assert [info.name for info in tracer.info.modules] == ["", "layer"]


def test_a_criterion_made_anew_in_each_step_is_one_root(tmp_path: Path) -> None:
    def run() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            nn.MSELoss()(model(X), torch.zeros(2, 2)).backward()
            optimizer.step()

    recorded = record(None, tmp_path, run)
    assert [info.name for info in recorded.info.modules] == ["", "0", "1", "2", "MSELoss"]
    assert recorded.columns("step", "call", module="MSELoss", tensor="output") == [(n, 0) for n in range(4)]
    assert recorded.info.modules[-1].calls == 4


def test_replicas_of_data_parallel_are_counted_and_are_no_roots(tmp_path: Path) -> None:
    def run() -> None:
        model = net()
        step(model)
        replica = model[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[0].weight * 1, model[0].bias * 1
        thread = threading.Thread(target=replica, args=(X,))
        thread.start()
        thread.join()

    recorded = record(None, tmp_path, run)
    assert [info.name for info in recorded.info.modules] == ["", "0", "1", "2"]
    assert recorded.info.unmeasured == {"call of a replica of DataParallel": 1}


def test_an_optimizer_that_steps_inside_of_a_call_starts_no_half_seen_call(tmp_path: Path) -> None:
    class Learner(nn.Module):
        """Takes steps of its own within its call; the calls that are open then began in another step."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                self.layer(x).sum().backward()
                self.optimizer.step()
            return self.layer(x)

    model = Learner()
    recorded = record(model, tmp_path, lambda: model(X), steps=(1, None))
    assert recorded.info.end == "completed"
    assert recorded.steps_in_full == [1]
    assert recorded.columns("step", "module", tensor="output") == [(1, "layer")]


# The replaced method -----------------------------------------------------------------------------------------


class _Counts:
    def __init__(self) -> None:
        self.calls = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return call(module, *args, **kwargs)

        return __call__


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_observers_may_leave_in_any_order(first_leaves_first: bool) -> None:
    original = nn.Module.__call__
    one, two = _Counts(), _Counts()
    interception.add(one)
    interception.add(two)
    nn.Identity()(X)
    order = [one, two] if first_leaves_first else [two, one]
    interception.remove(order[0])
    interception.remove(order[1])
    interception.remove(order[1])
    assert nn.Module.__call__ is original
    assert (one.calls, two.calls) == (1, 1)


def test_what_somebody_else_has_put_on_top_stays() -> None:
    original = nn.Module.__call__
    counts = _Counts()
    interception.add(counts)
    ours = nn.Module.__call__
    seen = []

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return ours(module, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        interception.remove(counts)
        assert torch.equal(nn.Identity()(X), X)
        assert seen == ["Identity"]
        assert nn.Module.__call__ is theirs
    finally:
        nn.Module.__call__ = ours
        interception.remove(counts)
    assert nn.Module.__call__ is original
