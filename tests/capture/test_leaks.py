"""Nothing that the script drops is kept alive: outputs, graphs, losses, and no memory grows from step to step."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from tests.live_objects import live

STEPS = 200


class Net(nn.Module):
    """Nested modules, an in-place operation, a skip connection, a dictionary as output, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Dropout(0.1))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        hidden = hidden + checkpoint(self.second, hidden, use_reentrant=False)
        return {"logits": self.head(hidden), "hidden": hidden}


@pytest.fixture(autouse=True)
def without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def tracer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tracer]:
    with Tracer(None, tmp_path / "run.parquet", _on_device=request.param) as tracer:
        yield tracer
    assert tracer.info.end == "completed"


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 4))["logits"].square().mean().backward()
    optimizer.step()


def forward_only(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With a graph that no backward ever goes through."""
    model(torch.randn(3, 4))


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.randn(3, 4))


def penalized(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(3, 4, requires_grad=True)
    hidden = model.first[0](inputs).tanh().sum()
    (slope,) = torch.autograd.grad(hidden, inputs, create_graph=True)
    slope.square().mean().backward()
    optimizer.step()


def failing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(RuntimeError):
        model(torch.randn(3, 5))
    trained(model, optimizer)


@pytest.mark.parametrize(
    ("step", "tracer"),
    [
        *((step, False) for step in (trained, forward_only, evaluated, penalized, failing)),
        *((step, True) for step in (trained, evaluated)),
    ],
    indirect=["tracer"],
)
def test_nothing_grows_from_step_to_step(tracer: Tracer, step: Callable[..., None]) -> None:
    model, optimizer = build()
    counts = []
    for number in range(STEPS):
        if step in (forward_only, evaluated):
            tracer.step(number)
        step(model, optimizer)
        if number in (STEPS // 2, STEPS - 1):
            counts.append(live())
    assert counts[1] - counts[0] == Counter()


@pytest.mark.parametrize("step", [trained, forward_only, evaluated, failing])
def test_a_step_leaves_nothing_more_to_the_garbage_collector(tmp_path: Path, step: Callable[..., None]) -> None:
    def left() -> int:
        model, optimizer = build()
        for number in range(25):
            if number == 5:  # what torch imports with the first steps
                gc.collect()
            step(model, optimizer)
        return gc.collect()

    unrecorded = left()  # torch's own checkpoint leaves something
    with Tracer(None, tmp_path / "run.parquet"):
        assert left() == unrecorded


def parts_of_replays() -> int:
    return sum(type(thing).__name__ in {"Kept", "Rerun", "_Stage", "BackwardNodes"} for thing in gc.get_objects())


def test_a_replay_leaves_no_batch_to_the_garbage_collector(tracer: Tracer) -> None:
    gc.collect()
    before = parts_of_replays()
    model, optimizer = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradtraceWarning)
        for _ in range(2):  # the first has torch import things
            gc.collect()
            batch = torch.randn(3, 4)
            batch[0, 0] = torch.nan
            dead = weakref.ref(batch)
            optimizer.zero_grad()
            model(batch)["logits"].square().mean().backward()
            del batch
            optimizer.zero_grad()
            optimizer.step()
    assert dead() is None
    assert parts_of_replays() == before


def test_a_class_that_was_made_for_one_model_is_not_kept(tmp_path: Path) -> None:
    with Tracer(None, tmp_path / "run.parquet") as tracer:
        classes = []
        for number in range(6):
            kind = type(f"Net{number % 3}", (Net,), {})
            classes.append(weakref.ref(kind))
            model = kind()
            trained(model, torch.optim.SGD(model.parameters(), lr=0.01))
            del kind, model
            gc.collect()
        assert [reference() for reference in classes] == [None] * 6
        assert len(tracer._session.names.roots) == 1  # the last one's, until the step after it ends
    names = {module.name.partition(".")[0] for module in tracer.info.modules if module.root}
    assert names == {"", *(f"model_{number}" for number in range(2, 7))}


def test_outputs_losses_and_graphs_die_when_the_script_drops_them(tracer: Tracer) -> None:
    model, optimizer = build()
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(torch.randn(3, 4))
        loss = outputs["logits"].square().mean()
        dead = [weakref.ref(thing) for thing in (*outputs.values(), loss)]
        nodes = [weakref.ref(_Marked(loss.grad_fn)), weakref.ref(_Marked(outputs["logits"].grad_fn))]
        loss.backward()
        del outputs, loss
        assert [reference() for reference in dead] == [None] * 3
        assert [reference() for reference in nodes] == [None] * 2
        optimizer.step()


class _Marked:
    """Lives in a node's own dictionary, so that it dies with the node."""

    def __init__(self, node: Any) -> None:
        node.metadata["marked"] = self


def test_a_graph_that_no_backward_went_through_dies_with_its_output(tracer: Tracer) -> None:
    model, _ = build()
    outputs = model(torch.randn(3, 4))
    node = weakref.ref(_Marked(outputs["logits"].grad_fn))
    dead = weakref.ref(outputs["logits"])
    del outputs
    assert (dead(), node()) == (None, None)


def test_a_gradient_is_not_kept_so_that_it_can_be_accumulated_in_place(tracer: Tracer) -> None:
    model, _ = build()
    model(torch.randn(3, 4))["logits"].sum().backward()
    places = [parameter.grad.data_ptr() for parameter in model.parameters()]
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model(torch.randn(3, 4))["logits"].sum().backward()
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
    model.zero_grad(set_to_none=True)
    assert [gradient() for gradient in gradients] == [None] * 8


def test_twenty_models_in_a_row_leave_nothing(tracer: Tracer) -> None:
    counts, dead = [], []
    for trial in range(20):
        model, optimizer = build()
        trained(model, optimizer)
        dead += [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
        del model, optimizer
        assert {reference() for reference in dead} == {None}
        if trial in (9, 19):
            counts.append(live())
    growth = counts[1] - counts[0]
    assert "Tensor" not in growth
    assert not [kind for kind in growth if kind not in ("ModuleEntry", "TensorEntry", "Root", "ModuleInfo")]
