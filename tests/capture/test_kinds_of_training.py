"""Ways to train that are not one forward, one backward and one step: the same training, and the right rows."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrace.capture import session as session_module
from gradtrace.capture.arrivals import Arrivals
from gradtrace.capture.session import IN_CUDA_GRAPH, IN_TRANSFORM
from tests.capture.tracing import Recorded, assert_holds, record

pytestmark = pytest.mark.filterwarnings(
    "ignore:Lazy modules are a new feature:UserWarning",
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:.*nested tensors.*:UserWarning",
    "ignore:.*(torch.ao.quantization|quantize_per_tensor|Complex modules|reduce_range).*",
)

Outcome = list[Tensor]


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr, momentum=0.5)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(sizes):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def state(*models: nn.Module) -> Outcome:
    return [value.detach().clone() for model in models for value in model.state_dict().values()]


def steps(model: Any, *batches: Tensor) -> Outcome:
    """Train a model in the plain way, one step for each batch."""
    optimizer, losses = sgd(model), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model)]


def batches(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape) for _ in range(3)]


# The trainings -------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A checkpoint inside of a checkpoint."""

    def __init__(self, inner: bool, outer: bool) -> None:
        super().__init__()
        self.first, self.block, self.deep, self.last = nn.Linear(3, 4), mlp(4, 4), mlp(4, 5, 4), nn.Linear(4, 1)
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.outer))  # type: ignore[no-any-return]

    def middle(self, x: Tensor) -> Tensor:
        return self.block(x) + checkpoint(self.deep, x, use_reentrant=self.inner)  # type: ignore[no-any-return]


def nested_checkpoints() -> Outcome:
    kinds = [(False, False), (True, True)]
    return [value for inner, outer in kinds for value in steps(Checkpointed(inner, outer), *batches(5, 3))]


def functional_gradients() -> Outcome:
    model = mlp(3, 4, 1)
    parameters = dict(model.named_parameters())

    def loss_of(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()  # type: ignore[no-any-return]

    for batch in batches(5, 3):
        gradients = torch.func.grad(loss_of)(parameters, batch)
        parameters = {name: (value - 0.1 * gradients[name]).detach() for name, value in parameters.items()}
    per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, torch.randn(5, 1, 3))
    return [*parameters.values(), *per_sample.values()]


def data_parallel() -> Outcome:
    return steps(nn.DataParallel(mlp(3, 4, 1)), *batches(5, 3))


def optimizer_in_backward() -> Outcome:
    model = mlp(3, 4, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    losses = []
    for batch in batches(5, 3):
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    for handle in handles:  # the collector cannot free a parameter whose hook holds it, and with it the optimizer
        handle.remove()
    return [*losses, *state(model)]


def manual_updates() -> Outcome:
    model = mlp(3, 4, 1)
    for batch in batches(5, 3):
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return state(model)


def several_optimizers() -> Outcome:
    critic, actor = mlp(3, 4, 1), mlp(2, 3)
    of_critic, of_actor = torch.optim.Adam(critic.parameters(), lr=0.1), sgd(actor)
    for batch in batches(5, 2):
        of_critic.zero_grad()
        critic(actor(batch).detach()).square().mean().backward()
        of_critic.step()
        of_actor.zero_grad()
        critic(actor(batch)).mean().backward()
        of_actor.step()
    return state(critic, actor)


class Reversible(torch.autograd.Function):
    """Keeps no values of the block: its backward runs the block again and a backward pass through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *weights: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None, *(None for _ in ctx.block.parameters())


class Reverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), mlp(4, 5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Reversible.apply(self.first(x), self.block, *self.block.parameters()))  # type: ignore[no-any-return]


def backward_in_a_function() -> Outcome:
    return steps(Reverses(), *batches(5, 3))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3, sparse=True)
        self.bag = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.embed(index).sum(1) * self.bag(index)  # type: ignore[no-any-return]


def sparse_gradients() -> Outcome:
    model, losses = Sparse(), []
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randint(10, (2, 4))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model)]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.complex64)
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(self.layer(x.to(torch.complex64))) * self.filter).abs()


def complex_weights() -> Outcome:
    return steps(Complex(), *batches(5, 3))


class FakeQuantized(nn.Module):
    """As quantization-aware training has it: rounded forward, straight through backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor([0.1]))
        self.register_buffer("zero", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch._fake_quantize_learnable_per_tensor_affine(self.layer(x), self.scale, self.zero, -128, 127, 1.0)


def quantization_aware() -> Outcome:
    return steps(FakeQuantized(), *batches(5, 3))


class FrozenQuantized(nn.Module):
    """Trains a head on features of a quantized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize, self.layer = nnq.Quantize(0.1, 64, torch.quint8), nnq.Linear(3, 4)
        self.back, self.head = nnq.DeQuantize(), nn.Linear(4, 1)
        self.layer.set_weight_bias(torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 0, torch.qint8), torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.layer(self.quantize(x))))  # type: ignore[no-any-return]


def on_quantized_features() -> Outcome:
    model = FrozenQuantized()
    optimizer, losses = sgd(model.head), []
    for batch in batches(5, 3):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model.head)]


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x).relu())  # type: ignore[no-any-return]


def nested_tensors(layout: torch.layout) -> Outcome:
    model, losses = Ragged(), []
    optimizer = sgd(model)
    for _ in range(3):
        batch = torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 4)], layout=layout)
        optimizer.zero_grad()
        loss = torch.cat([part.square().flatten() for part in model(batch).unbind()]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model)]


def jagged_tensors() -> Outcome:
    return nested_tensors(torch.jagged)


def strided_nested_tensors() -> Outcome:
    return nested_tensors(torch.strided)


class PartlyScripted(nn.Module):
    def __init__(self, *, scripted: bool) -> None:
        super().__init__()
        self.scripted, self.last = mlp(3, 4), nn.Linear(4, 1)
        if scripted:
            self.scripted = torch.jit.script(self.scripted)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scripted(x).tanh())  # type: ignore[no-any-return]


def scripted_part(*, scripted: bool = True) -> Outcome:
    return steps(PartlyScripted(scripted=scripted), *batches(5, 3))


def scripted_model() -> Outcome:
    return steps(torch.jit.script(mlp(3, 4, 1)), *batches(5, 3))


def traced_model() -> Outcome:
    return steps(torch.jit.trace(mlp(3, 4, 1), torch.randn(5, 3)), *batches(5, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).tanh())  # type: ignore[no-any-return]


def tied_weights() -> Outcome:
    return steps(Tied(), *batches(5, 3))


def parametrized() -> Outcome:
    model = mlp(3, 4, 1)
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2])
    return steps(model, *batches(5, 3))


def lazy_modules() -> Outcome:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    model(torch.randn(5, 3))
    return steps(model, *batches(5, 3))


def swapped_modules() -> Outcome:
    model, losses = mlp(3, 4, 1), []
    for number, batch in enumerate(batches(5, 3)):
        if number == 1:
            model[0] = nn.Linear(3, 4)
        if number == 2:
            model[1] = mlp(4, 4)
        optimizer = sgd(model)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model)]


def threads() -> Outcome:
    models, data = [mlp(3, 4, 1) for _ in range(2)], batches(5, 3)
    workers = [threading.Thread(target=steps, args=(model, *data)) for model in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return state(*models)


def pruned() -> Outcome:
    model = mlp(3, 4, 1)
    nn.utils.prune.random_unstructured(model[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return steps(model, *batches(5, 3))


TRAININGS = [
    nested_checkpoints, functional_gradients, data_parallel, optimizer_in_backward, manual_updates, several_optimizers,
    backward_in_a_function, sparse_gradients, complex_weights, quantization_aware, on_quantized_features,
    jagged_tensors, strided_nested_tensors, scripted_part, scripted_model, traced_model, tied_weights, parametrized,
    lazy_modules, swapped_modules, threads, pruned,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["full", "watch"])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_it_is_the_same_training(training: Callable[[], Outcome], mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, random = training(), torch.get_rng_state()
    torch.manual_seed(0)
    others: Outcome = []
    # Watched from the second step on.
    options: dict[str, Any] = {} if mode == "full" else {"steps": (0, 1)}
    recorded = record(None, tmp_path, lambda: others.extend(training()), **options)
    assert recorded.info.end == "completed"
    assert len(plain) == len(others)
    for one, other in zip(plain, others, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), random)


def recorded_of(training: Callable[[], Outcome], folder: Path) -> Recorded:
    torch.manual_seed(0)
    return record(None, folder, training)


# What is recorded, against torch's own hooks -------------------------------------------------------------------


class Seen:
    """What torch's own hooks see: each module's outputs in order, and all gradients of parameters."""

    def __init__(self) -> None:
        self.outputs: list[float] = []
        self.gradients: list[float] = []
        self._known: set[int] = set()
        self._models: list[nn.Module] = []

    def called(self, module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(module, nn.DataParallel):
            return
        self._models.append(module)  # so that no id is used twice
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self._known and parameter.requires_grad:
                self._known.add(id(parameter))
                parameter.register_hook(self.arrived)
        if result.is_floating_point() or result.is_complex():
            self.outputs.append(norm(result))

    def arrived(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # a function of the user's own may return none
            self.gradients.append(norm(gradient))


def norm(value: Tensor) -> float:
    value = value.detach().coalesce().values() if value.is_sparse else value.detach()
    value = value.values() if value.is_nested else value
    return float(torch.linalg.vector_norm(value).item())


@pytest.mark.parametrize(
    "training",
    [
        nested_checkpoints, data_parallel, optimizer_in_backward, manual_updates, several_optimizers,
        backward_in_a_function, complex_weights, quantization_aware, on_quantized_features, jagged_tensors,
        tied_weights, parametrized, lazy_modules, swapped_modules, pruned,
    ],
    ids=lambda training: training.__name__,
)  # fmt: skip
def test_outputs_and_gradients_are_those_that_hooks_see(training: Callable[[], Outcome], tmp_path: Path) -> None:
    seen = Seen()
    torch.manual_seed(0)
    handle = nn.modules.module.register_module_forward_hook(seen.called)
    try:
        training()
    finally:
        handle.remove()
    recorded = recorded_of(training, tmp_path)
    assert [row["norm"] for row in recorded.where(tensor="output")] == pytest.approx(seen.outputs, rel=1e-5)
    gradients = [row["norm"] for row in recorded.where(tensor="grad", phase="backward")]
    assert sorted(gradients) == pytest.approx(sorted(seen.gradients), rel=1e-5)
    assert gradients and recorded.info.unmeasured == {}


def test_a_checkpoint_inside_of_a_checkpoint_is_seen_once_backward(tmp_path: Path) -> None:
    """Each layer's gradients come once; what runs again is a recomputation and no step or pass of its own."""
    recorded = recorded_of(nested_checkpoints, tmp_path)
    assert recorded.info.steps == 6
    for step in range(6):
        for name in ("first", "block.0", "deep.0", "deep.2", "last"):
            assert len(recorded.where(step=step, module=name, tensor="grad_output")) == 1
        forward = recorded.columns("module", step=step, tensor="output", phase="forward")
        assert [name for (name,) in forward] == [
            "first", "block.0", "block", "deep.0", "deep.1", "deep.2", "deep", "last", ""
        ]  # fmt: skip
        assert {name for (name,) in recorded.columns("module", step=step, phase="recompute")} == {
            "block", "block.0", "deep", "deep.0", "deep.1", "deep.2"
        }  # fmt: skip
        assert recorded.columns("micro_step", step=step, tensor="loss") == [(0,)]


def test_what_torch_func_runs_cannot_be_seen_and_is_counted(tmp_path: Path) -> None:
    recorded = recorded_of(functional_gradients, tmp_path)
    assert recorded.rows == []
    assert recorded.info.unmeasured == {IN_TRANSFORM: 4 * 4}  # a model of four modules in four calls
    assert IN_TRANSFORM == "module call inside of vmap, torch.func.grad or the like"


def test_an_ordinary_pass_around_torch_func_is_seen(tmp_path: Path) -> None:
    """As where a loss has a model's own derivative in it."""
    model, x = mlp(1, 4, 1), torch.randn(5, 1)

    def slope(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda point: model(point).sum()))(x)  # type: ignore[no-any-return]

    loss = (slope(x) - model(x)).square().mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    recorded = record(model, tmp_path, lambda: (slope(x) - model(x)).square().mean().backward())
    assert_holds(recorded.only(tensor="loss"), loss)
    assert_holds(recorded.only(tensor="output", module=""), model(x))
    seen = {f"{row['module']}.{row['path']}": row for row in recorded.where(tensor="grad")}
    for name, row in seen.items():
        assert_holds(row, expected[name])
    assert seen.keys() == expected.keys()
    assert recorded.info.unmeasured == {IN_TRANSFORM: 4}


def test_data_parallel_on_the_host_is_the_module_itself(tmp_path: Path) -> None:
    recorded = recorded_of(data_parallel, tmp_path)
    assert [(info.name, info.calls) for info in recorded.info.modules] == [("", 3), ("0", 3), ("1", 3), ("2", 3)]
    assert recorded.info.steps == 3 and recorded.info.unmeasured == {}


def test_replicas_of_data_parallel_are_counted_and_the_gradients_of_the_model_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one device here, for which DataParallel makes no replicas: the test makes two, as it does for two."""

    def replicated(parallel: nn.DataParallel[Any], batch: Tensor) -> Tensor:
        results: dict[int, Tensor] = {}

        def work(number: int, part: Tensor) -> None:
            results[number] = replica_of(parallel.module)(part)

        workers = [threading.Thread(target=work, args=each) for each in enumerate(batch.chunk(2))]
        for worker in workers:
            worker.start()
            worker.join()
        return torch.cat([results[0], results[1]])

    monkeypatch.setattr(nn.DataParallel, "forward", replicated)
    twin = mlp(3, 4, 1)
    model = nn.DataParallel(copy.deepcopy(twin))
    x = torch.randn(4, 3)
    gradients = torch.autograd.grad(twin(x).square().mean(), list(twin.parameters()))

    def run() -> None:
        optimizer = sgd(model)
        model(x).square().mean().backward()
        optimizer.step()

    recorded = record(None, tmp_path, run)
    assert [info.name for info in recorded.info.modules] == ["", "0", "1", "2"]
    assert recorded.info.unmeasured == {"call of a replica of DataParallel": 8}
    seen = {f"{row['module']}.{row['path']}": row for row in recorded.where(tensor="grad")}
    for (name, _), gradient in zip(twin.named_parameters(), gradients, strict=True):
        assert_holds(seen[name], gradient)
    assert len(recorded.where(tensor="param", phase="optimizer")) == 4


def replica_of(module: nn.Module) -> nn.Module:
    replica = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica._modules = {name: replica_of(child) for name, child in module._modules.items() if child is not None}
    for name, parameter in module._parameters.items():
        replica._parameters.pop(name, None)
        setattr(replica, name, None if parameter is None else parameter * 1)
    return replica  # type: ignore[no-any-return]


def test_an_optimizer_in_backward_steps_as_each_gradient_arrives(tmp_path: Path) -> None:
    recorded = recorded_of(optimizer_in_backward, tmp_path)
    assert recorded.info.steps == 3
    for step in range(3):
        order = [row["tensor"] for row in recorded.where(step=step) if row["tensor"] in ("grad", "lr")]
        assert order == ["grad", "lr"] * 4
        assert len(recorded.where(step=step, tensor="param", phase="optimizer")) >= 4


def test_a_nested_pass_of_a_function_belongs_to_the_pass_around_it(tmp_path: Path) -> None:
    recorded = recorded_of(backward_in_a_function, tmp_path)
    assert recorded.columns("step", "micro_step", "detail", tensor="loss") == [(n, 0, None) for n in range(3)]
    assert {row["phase"] for row in recorded.where(module="block", tensor="output")} == {"forward", "recompute"}
    assert {row["detail"] for row in recorded.where(phase="backward")} == {None}


def test_sparse_gradients_of_embeddings_are_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sparse()
    index = torch.tensor([[1, 7, 1, 2], [3, 3, 3, 3]])
    model(index).sum().backward()
    assert model.embed.weight.grad is not None and model.bag.weight.grad is not None
    arrived = {name: getattr(model, name).weight.grad._values() for name in ("embed", "bag")}
    twin = copy.deepcopy(model)
    twin.zero_grad()
    recorded = record(twin, tmp_path, lambda: twin(index).sum().backward())
    for name, values in arrived.items():
        row = recorded.only(tensor="grad", module=name)
        assert (row["shape"], row["numel"]) == ("[10, 3]", values.numel())
        assert (row["min"], row["max"]) == pytest.approx((values.min().item(), values.max().item()))
        assert row["norm"] == pytest.approx(values.norm().item())


def test_of_complex_boundaries_the_magnitudes_are_recorded(tmp_path: Path) -> None:
    model, x = Complex(), torch.randn(5, 3)
    hidden = model.layer(x.to(torch.complex64))
    output = model(x)
    of_hidden, of_filter = torch.autograd.grad(model_tail(model, hidden).sum(), [hidden, model.filter])
    recorded = record(model, tmp_path, lambda: model(x).sum().backward())
    assert_holds(recorded.only(tensor="output", module=""), output)
    for row, value in (
        (recorded.only(tensor="output", module="layer"), hidden),
        (recorded.only(tensor="grad_output", module="layer"), of_hidden),
        (recorded.only(tensor="grad", path="filter"), of_filter),
    ):
        assert row["dtype"] == "complex64" and row["shape"] == str(list(value.shape))
        magnitudes = value.detach().abs()
        assert (row["min"], row["max"], row["norm"]) == pytest.approx(
            (magnitudes.min().item(), magnitudes.max().item(), magnitudes.norm().item()), rel=1e-5
        )


def model_tail(model: Complex, hidden: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(hidden) * model.filter).abs()


def test_quantized_tensors_hold_no_nan_and_have_no_records(tmp_path: Path) -> None:
    recorded = recorded_of(on_quantized_features, tmp_path)
    assert recorded.columns("module", "tensor", step=0, phase="forward") == [
        ("quantize", "input"), ("back", "output"), ("head", "input"), ("head", "output"), ("", "output")
    ]  # fmt: skip
    assert recorded.info.unmeasured == {}


def test_jagged_tensors_are_measured_and_strided_nested_ones_counted(tmp_path: Path) -> None:
    jagged = recorded_of(jagged_tensors, tmp_path)
    strided = recorded_of(strided_nested_tensors, tmp_path)
    gradients = [
        {(row["step"], row["module"], row["path"]): row["norm"] for row in recorded.where(tensor="grad")}
        for recorded in (jagged, strided)
    ]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5) and len(gradients[0]) == 12
    assert len(jagged.where(tensor="output")) == 9 and jagged.info.unmeasured == {}
    assert strided.where(tensor="output") == [] and strided.info.unmeasured["nested tensor"] == 3 * 10


@pytest.mark.parametrize("training", [scripted_model, traced_model], ids=["scripted", "traced"])
def test_of_a_scripted_model_the_boundary_is_seen_and_the_note_names_it(
    training: Callable[[], Outcome], tmp_path: Path
) -> None:
    recorded = recorded_of(training, tmp_path)
    root = "" if training is scripted_model else "model"
    for step in range(3):
        (row,) = recorded.where(step=step, module=root, tensor="output", phase="forward")
        assert recorded.where(step=step, module=root, tensor="grad_output")[0]["shape"] == row["shape"]
    assert len(recorded.where(tensor="grad")) == 4 * 3
    (note,) = recorded.info.notes
    assert note == f"3 modules ran inside of scripted ones (torch.jit) and cannot be seen: below {root or 'the root'}"


def test_the_parts_of_a_scripted_part_are_named(tmp_path: Path) -> None:
    recorded = recorded_of(scripted_part, tmp_path)
    assert len(recorded.where(module="scripted", tensor="output")) == 3
    plain = recorded_of(lambda: scripted_part(scripted=False), tmp_path)
    for tensor, module in (("grad", "scripted.0"), ("grad", "last"), ("grad_output", "scripted"), ("output", "")):
        wanted = {"tensor": tensor, "module": module}
        columns = [each.columns("step", "module", "path", "norm", **wanted) for each in (recorded, plain)]
        assert [row[:3] for row in columns[0]] == [row[:3] for row in columns[1]] and columns[0]
        assert [row[3] for row in columns[0]] == pytest.approx([row[3] for row in columns[1]], rel=1e-5)
    assert recorded.info.notes == [
        "1 module ran inside of scripted ones (torch.jit) and cannot be seen: below scripted"
    ]


def test_a_module_that_is_swapped_during_the_run_goes_by_the_place_that_it_takes(tmp_path: Path) -> None:
    recorded = recorded_of(swapped_modules, tmp_path)
    assert recorded.columns("step", "module", tensor="output", module="0") == [(0, "0"), (1, "0"), (2, "0")]
    assert recorded.columns("step", module="1.0", tensor="output") == [(2,)]
    assert len(recorded.where(step=2, tensor="grad")) == 6


def test_trainings_in_threads_keep_their_names_apart(tmp_path: Path) -> None:
    recorded = recorded_of(threads, tmp_path)
    roots = [info.name for info in recorded.info.modules if info.root]
    assert len(set(roots)) == 2
    for root in roots:
        assert len(recorded.where(module=root, tensor="output")) == 3
        # The first goes without a prefix where its first step was over before the other one began.
        assert len(recorded.where(module=f"{root}.0".lstrip("."), tensor="grad", phase="backward")) == 6


def test_a_backward_waits_for_the_hooks_that_another_thread_is_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*given: Any) -> None:
        time.sleep(0.02)
        hook(*given)

    def train(model: nn.Module, delay_s: float) -> None:
        loss = model(torch.randn(5, 3)).square().mean()
        both.wait()
        time.sleep(delay_s)
        loss.backward()

    def train_both() -> None:
        workers = [threading.Thread(target=train, args=(mlp(3, 4, 1), delay_s)) for delay_s in (0.0, 0.03)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    hook, both = Arrivals._hook, threading.Barrier(2)
    monkeypatch.setattr(Arrivals, "_hook", slowly)
    recorded = record(None, tmp_path, train_both)
    gradients = recorded.where(tensor="grad", phase="backward")
    assert [row["path"] for row in gradients].count("weight") == 4
    assert len({(row["module"], row["path"]) for row in gradients}) == len(gradients) == 8


def test_nothing_is_looked_at_while_a_cuda_graph_is_captured_as_a_stand_in_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no CUDA here: torch's own question is answered by the test. A measure would become part of the graph."""
    capturing = False
    monkeypatch.setattr(session_module, "_cuda_in_use", lambda: True)
    monkeypatch.setattr(session_module, "_is_capturing", lambda: capturing)
    model, x = mlp(3, 4, 1), torch.randn(5, 3)
    optimizer = sgd(model)

    def operations_of_a_step() -> list[str]:
        with torch.autograd.profiler.profile() as profiled:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [event.name for event in profiled.function_events if event.name.startswith("aten::")]

    operations_of_a_step()  # which makes the optimizer's state
    alone, captured, watched = operations_of_a_step(), [], []

    def run() -> None:
        nonlocal capturing
        watched.extend(operations_of_a_step())
        capturing = True
        captured.extend(operations_of_a_step())
        capturing = False
        operations_of_a_step()

    recorded = record(model, tmp_path, run)
    assert captured == alone and len(watched) > len(alone) > 20
    assert recorded.info.end == "completed"
    assert recorded.columns("step", tensor="loss") == [(0,), (1,)]
    assert recorded.columns("step", module="", tensor="output") == [(0,), (1,)]
    assert list(recorded.info.unmeasured) == [IN_CUDA_GRAPH]
    assert IN_CUDA_GRAPH == "call or hook while a CUDA graph was captured; its replays cannot be seen either"
