"""Op-level capture of chosen steps: what it records, and that the training does not notice."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gradtrace
from gradtrace.capture.operations.dispatch import take_out
from gradtrace.capture.operations.op_steps import OpRow, OpSteps
from gradtrace.capture.session import Session
from gradtrace.capture.tracer import Tracer

THIS = __file__


class Seen(NamedTuple):
    """One row as the file will show it."""

    phase: str
    module: str | None
    call: int | None
    tensor: str
    path: str
    op: str
    line: int | None
    row: OpRow


class Watch:
    """A tracer with op-level capture of all steps; what the tracer itself writes is not looked at."""

    def __init__(self, tracer: Tracer, first: int = 0, end: int = 99) -> None:
        self.rows: list[OpRow] = []
        self.session: Session = tracer._session
        stack = tracer._calls._thread.stack
        self.steps = OpSteps(self.session, first, end, lambda: stack[-1] if stack else None, self.rows.append)

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.steps.backward_begins([loss])
        try:
            loss.backward(**options)
        finally:
            self.steps.backward_ended(accumulating=True)

    def seen(self, **wanted: Any) -> list[Seen]:
        """Return the rows whose columns have these values."""
        rows = [
            Seen(
                r.phase,
                r.owner.name if r.owner else None,
                r.call,
                r.tensor,
                r.path,
                str(r.op),
                r.line if r.file == THIS else None,
                r,
            )
            for r in self.rows
        ]
        return [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]

    def ops(self, **wanted: Any) -> list[str]:
        return [row.op for row in self.seen(**wanted)]


@contextmanager
def watching(model: nn.Module, path: Path) -> Iterator[Watch]:
    with Tracer(model, path / "run.parquet", existing="overwrite") as tracer:
        watch = Watch(tracer)
        watch.steps.step_begins(0)
        try:
            yield watch
        finally:
            watch.steps.step_ends()
        assert watch.session.failure is None


def line_of(function: Callable[..., Any], offset: int) -> int:
    return function.__code__.co_firstlineno + offset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.linear(value)
        return hidden.exp() / 2


# What is recorded ---------------------------------------------------------------------------------------------


def test_every_operation_of_a_step_is_a_row_with_its_module_and_line(tmp_path: Path) -> None:
    model = Block()
    batch = torch.randn(4, 3)
    with watching(model, tmp_path) as watch:
        loss = model(batch).square().mean()
        watch.backward(loss)
    here = test_every_operation_of_a_step_is_a_row_with_its_module_and_line.__code__.co_firstlineno
    inside = Block.forward.__code__.co_firstlineno
    assert [row[:7] for row in watch.seen(tensor="output")] == [
        ("forward", "linear", 0, "output", "0", "TBackward0", inside + 1),
        ("forward", "linear", 0, "output", "0", "AddmmBackward0", inside + 1),
        ("forward", "", 0, "output", "0", "ExpBackward0", inside + 2),
        ("forward", "", 0, "output", "0", "DivBackward0", inside + 2),
        ("loss", None, None, "output", "0", "PowBackward0", here + 4),
        ("loss", None, None, "output", "0", "MeanBackward0", here + 4),
    ]
    assert [row[:7] for row in watch.seen(tensor="grad_input")] == [
        ("backward", None, None, "grad_input", "0", "MeanBackward0", here + 4),
        ("backward", None, None, "grad_input", "0", "PowBackward0", here + 4),
        ("backward", "", 0, "grad_input", "0", "DivBackward0", inside + 2),
        ("backward", "", 0, "grad_input", "0", "ExpBackward0", inside + 2),
        ("backward", "linear", 0, "grad_input", "0", "AddmmBackward0", inside + 1),  # of the bias
        ("backward", "linear", 0, "grad_input", "2", "AddmmBackward0", inside + 1),  # of the weight
        ("backward", "linear", 0, "grad_input", "0", "TBackward0", inside + 1),
    ]


def test_the_numbers_are_those_of_the_results(tmp_path: Path) -> None:
    source = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    with watching(nn.Identity(), tmp_path) as watch:
        loss = (source.log() * 2).sum()
        watch.backward(loss)
    log, double, total = [row.row.measure for row in watch.seen(tensor="output")]
    assert (log.neginf, log.nan, log.min, log.numel) == (1, 0, 0.0, 3)
    assert log.max == pytest.approx(1.0986123)
    assert double.max == pytest.approx(2.1972246)
    assert (total.neginf, total.min, list(total.shape)) == (1, None, [])
    slopes = watch.seen(op="LogBackward0", tensor="grad_input")[0].row.measure  # 2 / x
    assert (slopes.posinf, slopes.min, slopes.max) == (1, pytest.approx(2 / 3), 2.0)


def test_hooks_of_torch_see_the_same_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    batch = torch.randn(6, 5)
    expected: list[tuple[str, int, float]] = []

    def note(name: str) -> Callable[[Any, Any], None]:
        def hook(results: Any, _: Any) -> None:
            for index, gradient in enumerate(results):
                if gradient is not None:
                    expected.append((name, index, gradient.double().norm().item()))

        return hook

    with watching(model, tmp_path) as watch:
        loss = model(batch).pow(2).mean()
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node: Any = nodes.pop()
            if node is not None and node not in seen and "Accumulate" not in node.name():
                seen.add(node)
                node.register_hook(note(node.name()))
                nodes += [target for target, _ in node.next_functions]
        watch.backward(loss)
    found = [(row.op, int(row.path), row.row.measure.norm) for row in watch.seen(tensor="grad_input")]
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-5)


def test_in_place_operations_show_what_they_left(tmp_path: Path) -> None:
    value = torch.tensor([1.0, -2.0])
    with torch.no_grad(), watching(nn.Identity(), tmp_path) as watch:
        value.mul_(3).relu_()
        torch.add(value, 1, out=value)
        value[0] = 8.0
    rows = [(row.op, row.row.measure.min, row.row.measure.max) for row in watch.seen()]
    assert rows[:3] == [("aten.mul_", -6, 3), ("aten.relu_", 0, 3), ("aten.add", 1, 4)]
    assert rows[-1] == ("aten.copy_", 8, 8)
    assert value.tolist() == [8, 1]


def test_a_new_tensor_that_is_changed_at_once_is_measured_twice(tmp_path: Path) -> None:
    with watching(nn.Identity(), tmp_path) as watch:
        (torch.ones(2) * 3).mul_(2).neg_()
    rows = [(row.op, row.row.measure.max) for row in watch.seen()]
    assert rows == [("aten.ones", 1), ("aten.mul", 3), ("aten.mul_", 6), ("aten.neg_", -6)]


def test_phases_follow_the_loop(tmp_path: Path) -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, tmp_path) as watch:
        batch = torch.randn(4, 3) * 2
        loss = model(batch).sum()
        watch.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model(batch).mean()
    phases = [row.phase for row in watch.seen()]
    assert [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase] == [
        "input",
        "forward",
        "loss",
        "backward",
        "optimizer",
        "evaluation",
    ]
    assert watch.ops(phase="input") == ["aten.randn", "aten.mul"]
    assert watch.ops(phase="loss") == ["SumBackward0"]
    assert "aten._foreach_norm" in watch.ops(phase="optimizer")
    assert [row.module for row in watch.seen(phase="evaluation")] == ["linear", "linear", "", "", None]


def test_an_optimizers_own_operations_and_the_closures(tmp_path: Path) -> None:
    model = Block()
    batch = torch.randn(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    with watching(model, tmp_path) as watch:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).log().square().sum()
            watch.backward(loss)
            return loss

        optimizer.step(closure)
    closures = [row.op for row in watch.seen(phase="loss")]
    assert closures[:3] == ["LogBackward0", "PowBackward0", "SumBackward0"]
    assert {row.module for row in watch.seen(phase="forward")} == {"", "linear"}
    assert watch.ops(phase="optimizer")
    assert watch.seen(phase="input") == []


def test_the_second_forward_of_a_checkpoint_is_a_recomputation(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, value: Tensor) -> Tensor:
            return checkpoint(self.block, value, use_reentrant=False)

    model = Outer()
    with watching(model, tmp_path) as watch:
        loss = model(torch.randn(4, 3)).sum()
        watch.backward(loss)
    names = ["TBackward0", "AddmmBackward0", "ExpBackward0", "DivBackward0"]
    forward = [(row.module, row.op) for row in watch.seen(phase="forward")]
    assert [op for _, op in forward] == names
    assert {row.module for row in watch.seen(phase="recompute")} == {"block", "block.linear"}
    # The second forward stops as soon as all that is needed has been made again.
    assert watch.ops(phase="recompute") == names[: len(watch.ops(phase="recompute"))]
    assert len(watch.ops(phase="recompute")) >= 3
    assert watch.ops(phase="backward") == ["SumBackward0", "DivBackward0", "ExpBackward0", "AddmmBackward0",
                                           "AddmmBackward0", "TBackward0"]  # fmt: skip


def test_passes_inside_of_a_pass_have_their_nodes_too(tmp_path: Path) -> None:
    model = Block()
    batch = torch.randn(4, 3, requires_grad=True)
    with watching(model, tmp_path) as watch:
        original = torch.autograd._engine_run_backward

        def engine(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            watch.steps.backward_begins(outputs)
            try:
                return original(outputs, *args, **kwargs)
            finally:
                watch.steps.backward_ended(accumulating=True)

        torch.autograd._engine_run_backward = engine
        try:
            checkpoint(model, batch, use_reentrant=True).sum().backward()
        finally:
            torch.autograd._engine_run_backward = original
    backward = watch.ops(phase="backward")
    assert backward[:5] == ["SumBackward0", "DivBackward0", "ExpBackward0", "AddmmBackward0", "AddmmBackward0"]
    assert "CheckpointFunctionBackward" in backward
    assert watch.ops(phase="recompute")[-2:] == ["ExpBackward0", "DivBackward0"]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return gradient * 3 * value * value


def test_a_custom_function_is_its_kernels_forward_and_one_node_backward(tmp_path: Path) -> None:
    source = torch.tensor([2.0], requires_grad=True)
    with watching(nn.Identity(), tmp_path) as watch:
        loss = Cube.apply(source)
        watch.backward(loss)
    kernels = [(row.op, row.line) for row in watch.seen(tensor="output")]
    assert kernels == [("aten.mul", line_of(Cube.forward, 3))] * 2
    (node,) = watch.seen(tensor="grad_input")
    assert (node.op, node.line, node.row.measure.max) == ("CubeBackward", line_of(Cube.forward, 3), 12.0)


def test_a_second_pass_through_a_graph_is_recorded_once_more_and_not_twice(tmp_path: Path) -> None:
    source = torch.tensor([2.0], requires_grad=True)
    with watching(nn.Identity(), tmp_path) as watch:
        loss = source.exp()
        watch.backward(loss, retain_graph=True)
        watch.backward(loss)
        loss = source.exp()
    assert watch.ops(tensor="grad_input") == ["ExpBackward0"] * 2


def test_only_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    model = Block()
    with Tracer(model, tmp_path / "run.parquet") as tracer:
        watch = Watch(tracer, 1, 3)
        for step in range(4):
            watch.steps.step_begins(step)
            torch.full((1,), float(step)).mul(1)
        watch.steps.step_ends()
        torch.full((1,), 9.0).mul(1)
    assert [row.measure.max for row in watch.rows] == [1, 1, 2, 2]


def test_nothing_is_recorded_while_it_pauses(tmp_path: Path) -> None:
    source = torch.tensor([2.0], requires_grad=True)
    with watching(nn.Identity(), tmp_path) as watch:
        watch.steps.paused = True
        watch.backward(source.exp())
        watch.steps.paused = False
        result = source.log()
        assert result.requires_grad
    assert watch.ops() == ["LogBackward0"]


def test_modules_that_are_not_selected_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with Tracer(model, tmp_path / "run.parquet", exclude=["0"]) as tracer:
        watch = Watch(tracer)
        watch.steps.step_begins(0)
        watch.backward(model(torch.ones(1, 2)).sum())
        watch.steps.step_ends()
    assert {row.module for row in watch.seen()} == {"1", None}


def test_what_gradtrace_measures_is_not_among_the_rows(tmp_path: Path) -> None:
    model = Block()
    with watching(model, tmp_path) as watch:
        result = model(torch.randn(4, 3))
        assert len(watch.session.rows) > 0  # the boundaries have been measured in the meantime
    assert result.shape == (4, 2)
    assert watch.ops(phase="forward") == ["TBackward0", "AddmmBackward0", "ExpBackward0", "DivBackward0"]
    assert not {"aten.aminmax", "aten.linalg_vector_norm", "aten.isnan"}.intersection(watch.ops())


def test_operations_of_gradtraces_own_are_not_among_the_rows(tmp_path: Path) -> None:
    part: dict[str, Any] = {}
    exec(compile("def work(tensor):\n    return tensor * 2", gradtrace.__file__, "exec"), part)
    with watching(nn.Identity(), tmp_path) as watch:
        one = torch.ones(1)
        watch.session.guarded(part["work"])(one)
        assert watch.ops() == ["aten.ones"]
        part["work"](one)  # such as the wrappers around a user's call
    assert watch.ops() == ["aten.ones", "aten.mul"]


# The training does not notice ---------------------------------------------------------------------------------


class Everything(nn.Module):
    """In-place operations, dropout, batch norm, checkpointing of both kinds, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.norm(self.first(batch)).unsqueeze(1)
        hidden = hidden + checkpoint(self.encoder, hidden, use_reentrant=False)
        hidden = hidden.float()
        hidden = checkpoint(self.bilinear, hidden, hidden, use_reentrant=True).squeeze(1)
        hidden += 0.1
        return self.head(hidden)


def train(watch: Callable[[nn.Module], OpSteps | None], *, autocast: bool) -> list[Tensor]:
    torch.manual_seed(5)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = watch(model)
    losses = []
    for step in range(3):
        if steps is not None:
            steps.step_begins(step)
        batch, target = torch.randn(6, 8), torch.randint(3, (6,))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        if steps is not None:
            steps.backward_begins([loss])
        loss.backward()
        if steps is not None:
            steps.backward_ended(accumulating=True)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    if steps is not None:
        steps.step_ends()
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_weights_buffers_and_generator_are_the_same_bits(autocast: bool, tmp_path: Path) -> None:
    plain = train(lambda model: None, autocast=autocast)
    rows: list[OpRow] = []
    tracers: list[Tracer] = []

    def start(model: nn.Module) -> OpSteps:
        tracer = Tracer(model, tmp_path / "run.parquet").start()
        tracers.append(tracer)
        watch = Watch(tracer)
        watch.rows = rows
        return OpSteps(tracer._session, 0, 99, watch.steps._innermost, rows.append)

    watched = train(start, autocast=autocast)
    tracers[0].stop()
    assert len(rows) > 300
    assert tracers[0]._session.failure is None
    for left, right in zip(plain, watched, strict=True):
        assert torch.equal(left, right)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_stay_as_they_are_wherever_a_step_ends(tmp_path: Path) -> None:
    outer, inner = Counting(), Counting()
    one = torch.ones(1)
    with Tracer(nn.Identity(), tmp_path / "run.parquet") as tracer:
        watch = Watch(tracer, 0, 1)
        with outer:
            watch.steps.step_begins(0)
            one.add(1)
            with inner:
                one.add(1)
                watch.steps.step_ends()
                assert _get_current_dispatch_mode_stack() == [outer, inner]
                one.add(1)
            assert _get_current_dispatch_mode_stack() == [outer]
            watch.steps.step_begins(0)
        assert len(_get_current_dispatch_mode_stack()) == 1
        one.add(1)
        watch.steps.step_ends()
    assert _get_current_dispatch_mode_stack() == []
    assert (outer.count, inner.count) == (3, 2)
    assert watch.ops() == ["aten.add"] * 3


def test_a_step_that_ends_in_another_thread_is_over(tmp_path: Path) -> None:
    with watching(nn.Identity(), tmp_path) as watch:
        thread = threading.Thread(target=watch.steps.step_ends)
        thread.start()
        thread.join()
        torch.ones(1).mul(2)
        (left,) = _get_current_dispatch_mode_stack()
        take_out(left)
    assert watch.rows == []


def test_errors_of_the_users_operations_come_through(tmp_path: Path) -> None:
    with watching(nn.Identity(), tmp_path) as watch:
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.ones(2) + torch.ones(3)
        torch.ones(2).neg()
    assert watch.ops()[-1] == "aten.neg"


def test_data_loaders_deep_copies_and_saving_work_within_a_step(tmp_path: Path) -> None:
    model = Block()
    data = TensorDataset(torch.arange(6.0).view(2, 3))
    with watching(model, tmp_path) as watch:
        (batch,) = next(iter(DataLoader(data, batch_size=2, num_workers=1)))
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        twin.load_state_dict(torch.load(file, weights_only=True))
        loss = model(batch).sum() + twin(batch).sum()
        watch.backward(loss)
    assert batch.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), twin.parameters(), strict=True))
    assert model.linear.weight.grad is not None
    assert torch.equal(model.linear.weight.grad, twin.linear.weight.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_models_run_eagerly_and_are_seen(tmp_path: Path) -> None:
    model = Block()
    with watching(model, tmp_path) as watch:
        result = torch.compile(model)(torch.randn(4, 3))
        assert result.shape == (4, 2)
    assert watch.ops(phase="forward") == ["TBackward0", "AddmmBackward0", "ExpBackward0", "DivBackward0"]


def test_no_graph_and_no_tensor_lives_longer(tmp_path: Path) -> None:
    with watching(nn.Identity(), tmp_path) as watch:
        source = torch.ones(2, requires_grad=True)
        loss = source.exp().sum()
        node: Any = loss.grad_fn
        hidden, total = weakref.ref(node.next_functions[0][0]._saved_result), weakref.ref(loss)
        watch.backward(loss)
        gc.disable()
        try:
            del loss, node
            assert (hidden(), total()) == (None, None)
        finally:
            gc.enable()


def test_an_error_of_gradtraces_own_is_the_end_of_the_recording_only(tmp_path: Path) -> None:
    def fails(row: OpRow) -> None:
        raise ValueError("disk full")

    model = Block()
    with pytest.warns(UserWarning, match="disk full"):  # noqa: SIM117
        with Tracer(model, tmp_path / "run.parquet") as tracer:
            steps = OpSteps(tracer._session, 0, 1, lambda: None, fails)
            steps.step_begins(0)
            loss = model(torch.randn(4, 3)).sum()
            loss.backward()
            steps.step_ends()
    assert model.linear.weight.grad is not None
