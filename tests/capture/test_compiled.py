"""torch.compile while something is recorded: eager by default, or compiled and seen from outside.

The backends here run the captured graph as it is, with and without autograd's own compiler: whether torch generates
code from it makes no difference to what is seen. ``tests/integrations`` runs what generates code.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from gradtrace.capture.tracer import Tracer
from gradtrace.errors import CaptureError
from tests.capture.replaying import births, confirmations, rows_of, said_of
from tests.capture.tracing import Recorded, assert_holds, read, record

pytestmark = pytest.mark.filterwarnings(  # of torch's own, while it compiles, and of incidents
    "ignore::gradtrace.errors.GradtraceWarning",
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

BATCHES = [torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Block(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.two(hidden)


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 3), Block(breaks=breaks), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Graphs:
    """A backend that counts: what is compiled is run as it was captured."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, module: Any, _: Any) -> Callable[..., Any]:
        self.sizes.append(len([node for node in module.graph.nodes if node.op == "call_function"]))
        return module.forward  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, way: str, backend: Any) -> Any:
    if way == "function":
        return torch.compile(model, backend=backend)
    if way == "method":
        model.compile(backend=backend)
    if way == "part":
        model.block = torch.compile(model.block, backend=backend)  # type: ignore[assignment]
    if way == "part's method":
        model.block.compile(backend=backend)  # type: ignore[operator]
    return model


WAYS = ["function", "method", "part", "part's method"]


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def outcome(way: str, backend: Any, model: nn.Module) -> list[Tensor]:
    net = compiled(model, way, backend)
    losses = train(net, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def made(*, breaks: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(breaks=breaks)


def kept(folder: Path, run: Callable[[], Any], models: Any = None, **options: Any) -> Recorded:
    return record(models, folder, run, keep_compiled=True, **options)


# Numbers and graphs are those without gradtrace ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "watch"])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_the_same_to_the_last_bit(way: str, mode: str, tmp_path: Path) -> None:
    plain = outcome(way, "aot_eager", made())
    torch._dynamo.reset()
    others: list[Tensor] = []
    kept(tmp_path, lambda: others.extend(outcome(way, "aot_eager", made())), mode=mode)
    assert len(plain) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("before", [False, True], ids=["during", "before"])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_are_those_that_torch_makes_alone(way: str, before: bool, breaks: bool, tmp_path: Path) -> None:
    alone = Graphs()
    outcome(way, alone, made(breaks=breaks))
    breaks_alone = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()

    graphs, model = Graphs(), made(breaks=breaks)
    net = compiled(model, way, graphs) if before else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        nonlocal net
        net = net if before else compiled(model, way, graphs)
        train(net, optimizer)

    kept(tmp_path, run)
    assert graphs.sizes == alone.sizes and alone.sizes
    assert sum(counters["graph_break"].values()) == breaks_alone
    train(net, optimizer)  # and nothing is compiled anew when the recording is over
    assert graphs.sizes == alone.sizes


@pytest.mark.parametrize("way", ["function", "method"])
def test_graphs_of_a_container_are_those_that_torch_makes_alone(way: str, tmp_path: Path) -> None:
    """torch does not compile a container's own forward but what it calls, and the last layer not at all."""

    def run(graphs: Graphs) -> None:
        model = nn.Sequential(Block(), Block(breaks=True), nn.Linear(3, 1))
        train(compiled(model, way, graphs), torch.optim.SGD(model.parameters(), lr=0.1))

    alone, graphs = Graphs(), Graphs()
    run(alone)
    frames = counters.pop("frames")
    torch._dynamo.reset()
    recorded = kept(tmp_path, lambda: run(graphs))
    assert graphs.sizes == alone.sizes and alone.sizes
    assert counters["frames"] == frames  # torch has not tried to compile anything of gradtrace's
    if way == "method":
        assert recorded.columns("module", step=0, tensor="output") == [("0",), ("1",), ("2",), ("",)]


def test_a_region_that_must_be_whole_stays_whole(tmp_path: Path) -> None:
    def scaled(graphs: Graphs) -> None:
        model, scaler = made(), torch.amp.GradScaler("cpu", init_scale=4.0)
        loss_of = torch.compile(lambda x: model(x).square().mean(), backend=graphs, fullgraph=True)
        scale = torch.compile(lambda loss: scaler.scale(loss), backend=graphs)
        for batch in BATCHES:
            scale(loss_of(batch)).backward()

    alone, graphs = Graphs(), Graphs()
    scaled(alone)
    torch._dynamo.reset()
    kept(tmp_path, lambda: scaled(graphs))
    assert alone.sizes == graphs.sizes and alone.sizes


def test_what_is_exported_while_recording_is_exported_as_without(tmp_path: Path) -> None:
    """Where all of the code has to be captured nothing of gradtrace's may be in the way."""
    model, x = made(), BATCHES[0]
    exported: list[Any] = []

    def run() -> None:
        model(x).sum().backward()
        exported.append(torch.export.export(model, (x,), strict=True))

    recorded = kept(tmp_path, run, model)
    assert torch.allclose(exported[0].module()(x), model(x))
    assert torch.export.export(model, (x,), strict=True) is not None  # and when it is over
    assert recorded.info.end == "completed" and len(recorded.where(module="", tensor="output")) == 1


# What is seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["function", "method"])
@pytest.mark.parametrize("found", [False, True], ids=["named", "found"])
def test_of_a_compiled_model_its_boundary_is_seen_and_the_note_names_the_rest(
    way: str, found: bool, tmp_path: Path
) -> None:
    model = made()
    twin = made()
    batch = BATCHES[0]
    output = twin(batch)
    loss = output.square().mean()
    (arriving,) = torch.autograd.grad(loss, output, retain_graph=True)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    def run() -> None:
        net = compiled(model, way, "aot_eager")
        net(batch).square().mean().backward()

    recorded = kept(tmp_path, run, None if found else model)
    assert recorded.info.end == "completed"
    kinds = [(row["phase"], row["module"], row["tensor"]) for row in recorded.rows if row["tensor"] != "param"]
    assert kinds[:4] == [
        ("input", "", "input"), ("forward", "", "output"), ("loss", None, "loss"), ("backward", "", "grad_output")
    ]  # fmt: skip
    assert [tensor for _, _, tensor in kinds[4:]] == ["grad"] * 8
    assert_holds(recorded.only(tensor="input"), batch)
    assert_holds(recorded.only(tensor="output"), output)
    assert_holds(recorded.only(tensor="grad_output"), arriving)
    assert_holds(recorded.only(tensor="loss"), loss)
    seen = {f"{row['module']}.{row['path']}": row for row in recorded.where(tensor="grad")}
    assert seen.keys() == gradients.keys()
    for name, row in seen.items():
        assert_holds(row, gradients[name])
    assert {info.name: info.calls for info in recorded.info.modules} == {
        "": 1, "first": 0, "block": 0, "block.one": 0, "block.two": 0, "last": 0
    }  # fmt: skip
    assert recorded.info.notes == [
        "5 modules ran inside of compiled regions and cannot be seen: below the root",
    ]


@pytest.mark.parametrize("way", ["part", "part's method"])
def test_of_a_compiled_part_its_boundary_is_seen_and_all_around_it(way: str, tmp_path: Path) -> None:
    twin, batch = made(), BATCHES[0]
    values = {}

    def arrived(name: str, of_inputs: Any, of_outputs: Any) -> None:
        values[name] = of_inputs[0], of_outputs[0]

    for name in ("first", "block", "last"):
        module = twin.get_submodule(name)
        module.register_full_backward_hook(lambda _, *gradients, name=name: arrived(name, *gradients))
    inputs = batch.clone().requires_grad_()
    twin(inputs).square().mean().backward()

    def run() -> None:
        net = compiled(made(), way, "aot_eager")
        net(batch.clone().requires_grad_()).square().mean().backward()

    recorded = kept(tmp_path, run)
    assert recorded.columns("module", "call", tensor="output") == [("first", 0), ("block", 0), ("last", 0), ("", 0)]
    for name, (of_input, of_output) in values.items():
        assert_holds(recorded.only(module=name, tensor="grad_input"), of_input)
        assert_holds(recorded.only(module=name, tensor="grad_output"), of_output)
    assert recorded.info.notes == ["2 modules ran inside of compiled regions and cannot be seen: below block"]


def test_calls_between_two_graphs_are_seen(tmp_path: Path) -> None:
    """Where a graph breaks inside of a part, that part is called by Python and not inside of a graph."""
    recorded = kept(tmp_path, lambda: compiled(made(breaks=True), "function", "aot_eager")(BATCHES[0]).sum().backward())
    assert recorded.columns("module", tensor="output") == [("block",), ("",)]
    assert recorded.columns("module", tensor="grad_output") == [("",), ("block",)]
    assert recorded.info.notes == ["4 modules ran inside of compiled regions and cannot be seen: below the root"]


def test_compiled_functions_are_named(tmp_path: Path) -> None:
    model = made()

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.compile(loss_of, backend="aot_eager")

    def run() -> None:
        fast = torch.compile(loss_of, backend="aot_eager")
        for batch in BATCHES:
            fast(batch).backward()
            optimizer.step()

    recorded = kept(tmp_path, run, model)
    assert whole is not None and recorded.where(tensor="output") == []
    assert recorded.columns("step", tensor="loss") == [(0,), (1,), (2,)]
    assert len(recorded.where(tensor="grad")) == 8 * 3
    (note,) = recorded.info.notes
    assert note == f"what compiled functions call cannot be seen: {loss_of.__qualname__}"


# Replays -------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Rooted(nn.Module):
    """Not for a batch that has a negative number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.root = nn.Linear(3, 3), Root()

    def forward(self, x: Tensor) -> Tensor:
        return self.root(x) * self.layer(x)


@pytest.mark.parametrize("way", ["function", "method"])
@pytest.mark.parametrize("mode", ["full", "watch"])
def test_a_failing_step_is_replayed_eagerly_and_its_operation_named(mode: str, way: str, tmp_path: Path) -> None:
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = compiled(model, way, "aot_eager")
    batches = [torch.ones(2, 3), torch.ones(2, 3), -torch.ones(2, 3)]
    options: dict[str, Any] = {"steps": (0, 1)} if mode == "watch" else {}

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad()
            net(batch).mean().backward()
            optimizer.step()

    path = tmp_path / "run.parquet"
    with Tracer(None, path, keep_compiled=True, **options) as tracer:
        run()
    assert tracer.info.notes[-1:] == ["2 modules ran inside of compiled regions and cannot be seen: below the root"]
    said = confirmations(path)[0]
    assert (said.status, said.reason) == ("reproduced", None)
    assert births(path)[0][:3] == ("aten.sqrt", "root", "output")
    assert rows_of(path, "SELECT DISTINCT step FROM records WHERE phase = 'replay'") == [(2,)]


def test_a_replay_that_rounds_otherwise_says_so(tmp_path: Path) -> None:
    def halves(module: Any, _: Any) -> Callable[..., Any]:
        return lambda *inputs: tuple(value / 2 for value in module.forward(*inputs))

    model = Rooted()
    net = torch.compile(model, backend=halves)

    def run() -> None:
        net(torch.tensor([[1.0, 1.0, -1.0]])).sum().backward()

    said = said_of(None, tmp_path / "run.parquet", run, keep_compiled=True)
    assert said.status == "not_reproduced" and said.reason is not None
    assert "output 0 of the root: the step ran compiled, which rounds otherwise" in said.reason


# Eager while recording -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["graph", "hooks"])
@pytest.mark.parametrize("before", [False, True], ids=["during", "before"])
@pytest.mark.parametrize("way", WAYS)
def test_by_default_all_is_seen_and_the_note_is_there_once(way: str, before: bool, engine: str, tmp_path: Path) -> None:
    graphs, model = Graphs(), made()
    net = compiled(model, way, graphs) if before else None

    def run() -> None:
        (net if before else compiled(model, way, graphs))(BATCHES[0].clone().requires_grad_()).sum().backward()

    recorded = record(None, tmp_path, run, engine=engine)
    assert graphs.sizes == []
    assert recorded.columns("module", "call", tensor="output") == [
        (name, 0) for name in ("first", "block.one", "block.two", "block", "last", "")
    ]
    assert [note.partition(",")[0] for note in recorded.info.notes] == ["torch.compile ran eagerly while recording"]


def test_what_was_compiled_while_recording_holds_nothing_of_the_recording(tmp_path: Path) -> None:
    for options in ({}, {"keep_compiled": True}):
        tracer = Tracer(None, tmp_path / "run.parquet", existing="overwrite", **options)  # type: ignore[arg-type]
        with tracer:
            net = torch.compile(made(), backend="aot_eager")
            net(BATCHES[0]).sum().backward()
        session = weakref.ref(tracer._session)
        del tracer
        gc.collect()
        assert session() is None
        assert net(BATCHES[0]).shape == (5, 1)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="keep_compiled needs the engine 'graph'"):
        Tracer(None, tmp_path / "run.parquet", keep_compiled=True, engine="hooks")
    with pytest.raises(CaptureError, match="op_steps and keep_compiled exclude each other"):
        Tracer(None, tmp_path / "run.parquet", keep_compiled=True, op_steps=(0, 1))


def test_of_two_recordings_one_may_let_the_other_down(tmp_path: Path) -> None:
    """One that keeps compiled code and one that does not: then it runs eagerly, which both can see."""
    with Tracer(None, tmp_path / "kept.parquet", keep_compiled=True), Tracer(None, tmp_path / "eager.parquet"):
        compiled(made(), "function", "aot_eager")(BATCHES[0]).sum().backward()
    for name in ("kept", "eager"):
        assert len(read(tmp_path / f"{name}.parquet").where(tensor="output")) == 6
