"""The fused kernel under Triton's interpreter against a reference in Python's floats, and what surrounds it.

The interpreter is chosen before Triton is imported, so the kernel runs in a process of its own: this file as a
script, which prints what came out of every case.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrace.capture import fused
from gradtrace.capture.fused import FusedBuffer, Row, fetch
from gradtrace.capture.on_device import numbers_of as device_numbers
from gradtrace.capture.statistics import Statistics
from gradtrace.errors import GradtraceWarning

NAN, INF = math.nan, math.inf
SIZES = {
    torch.float32: (1, 7, 1023, 1024, 1025, fused.BLOCK, fused.BLOCK + 1),
    torch.float16: (1, 7, 1025, fused.BLOCK + 1),
    torch.bfloat16: (1, 7, 1025, fused.BLOCK + 1),
}
KINDS = [(dtype, numel) for dtype, sizes in SIZES.items() for numel in sizes]
ROOT = Path(__file__).parents[2]

# The cases: built in both processes ------------------------------------------------------------------------


def cycled(*values: float) -> Callable[[torch.dtype, int], Tensor]:
    def make(dtype: torch.dtype, numel: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat(-(-numel // len(values)))[:numel].to(dtype)

    return make


def spoiled(*specials: float) -> Callable[[torch.dtype, int], Tensor]:
    """Ordinary numbers; the specials stand at the end and at places all over."""

    def make(dtype: torch.dtype, numel: int) -> Tensor:
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul(3).to(dtype)
        for position, special in enumerate(specials):
            tensor[(numel - 1 - position) % numel] = special
            tensor[position * 5 :: 211] = special
        return tensor

    return make


def extremes(scale: Callable[[torch.finfo], float]) -> Callable[[torch.dtype, int], Tensor]:
    def make(dtype: torch.dtype, numel: int) -> Tensor:
        unit = scale(torch.finfo(dtype))
        return cycled(unit, -unit, unit / 2, 0.0)(dtype, numel)

    return make


PATTERNS: dict[str, Callable[[torch.dtype, int], Tensor]] = {
    "finite": spoiled(),
    "nan": spoiled(NAN),
    "posinf": spoiled(INF),
    "neginf": spoiled(-INF),
    "all kinds": spoiled(NAN, INF, -INF),
    "none finite": cycled(NAN, INF, -INF, INF),
    "only nan": cycled(NAN),
    "zeros": cycled(0.0),
    "negative zeros": cycled(-0.0),
    "negative": cycled(-1.5, -2.0, -0.25),
    "denormals": extremes(lambda info: 4 * info.smallest_normal * info.eps),
    "squares that overflow": extremes(lambda info: info.max),
    "squares that vanish": extremes(lambda info: math.sqrt(info.smallest_normal) / 1000),
    "uneven": cycled(2.0**14, -(2.0**-14), 1.0, NAN),
}


def large(dtype: torch.dtype) -> Tensor:
    """70,000 elements; the first block holds the only specials, the last (partial) one the extremes."""
    tensor = torch.rand(70_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[:3] = torch.tensor([NAN, INF, -INF])
    tensor[-2:] = torch.tensor([-9.0, 11.0])
    return tensor


def dense_views() -> dict[str, Tensor]:
    """Each is one stretch of memory in another order, with a NaN beside it that must not be seen."""
    base = torch.full((1000,), NAN)
    base[100:220] = torch.arange(120.0) - 40
    block = base[100:220]
    return {
        "part of a larger one": block,
        "transposed": block.view(10, 12).t(),
        "channels last": block.view(2, 3, 4, 5).permute(0, 3, 1, 2),
        "with sizes of one": block.as_strided((120, 1, 1), (1, 7, 500)),
        "0-dimensional": block[0],
    }


def other_tensors() -> dict[str, Tensor]:
    base = torch.arange(24.0).view(4, 6)
    return {
        "every second": base[:, ::2],
        "broadcast": base[:1].expand(3, 6),
        "overlapping": base.as_strided((3, 3), (1, 1)),
        "negated": torch._neg_view(torch.arange(3.0)),
        "empty": torch.empty(0),
        "float64": base.double(),
        "integers": base.long(),
        "complex": base.to(torch.complex64),
        "eight bits": base.to(torch.float8_e4m3fn),
    }


def all_cases() -> dict[str, Tensor]:
    cases = {
        f"{pattern}, {dtype}, {numel}": make(dtype, numel)
        for (pattern, make), (dtype, numel) in itertools.product(PATTERNS.items(), KINDS)
    }
    return cases | dense_views() | {"large": large(torch.float32)}


# The process of the interpreter -----------------------------------------------------------------------------


ORDERS = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 7, 2, 5, 4], [5, 2, 7, 0, 1, 6, 4, 3]]
"""In which blocks are read, and so in which their sums are added up."""


def mixed() -> dict[str, Tensor]:
    """Tensors that go either way, resolved together."""
    return other_tensors() | {pattern: make(torch.float32, 9) for pattern, make in PATTERNS.items()}


def measured(statistics: Statistics) -> dict[str, list[Any]]:
    with torch.no_grad():
        measures = {name: statistics.measure(tensor) for name, tensor in mixed().items()}
        statistics.resolve()
    return {name: [m.nan, m.posinf, m.neginf, m.min, m.max, m.norm] for name, m in measures.items()}


class Counting:
    """Launches ``kernel`` and notes the grids."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self.kernel[grid]


def numbers_of(buffer: FusedBuffer, tensor: Tensor) -> list[float]:
    row = buffer.row_for(tensor)
    assert row is not None
    return fetch([row])[0]


def main() -> None:
    """Run every case and print {what: ...} as JSON."""
    notes: list[str] = []
    kernel = Counting(fused._load())
    buffer = FusedBuffer(note=notes.append, load=lambda: kernel)
    assert buffer.row_for(torch.ones(3)) is not None
    del kernel.grids[:]
    cases = all_cases()
    rows = [buffer.row_for(tensor) for tensor in cases.values()]
    assert None not in rows, notes
    grids = list(kernel.grids)
    numbers = fetch([row for row in rows if row is not None])
    blocks = torch.randn(8, fused.BLOCK, generator=torch.Generator().manual_seed(3))
    ordered = [buffer.row_for(blocks[order]) for order in ORDERS]
    orders = [row.page.rows[row.place].tolist() for row in ordered if row is not None]
    fused._MOST_PROGRAMS = 4
    few = [numbers_of(buffer, large(dtype)) for dtype in SIZES]
    few_grids = kernel.grids[-3:]
    refused = [name for name, tensor in other_tensors().items() if buffer.row_for(tensor) is None]
    launched = len(kernel.grids)
    together = measured(Statistics(on_device=True, fused=buffer))
    launched = len(kernel.grids) - launched
    answer = {"numbers": dict(zip(cases, numbers, strict=True)), "grids": grids, "notes": notes}
    print(
        json.dumps(
            answer
            | {
                "orders": orders,
                "few": few,
                "few_grids": few_grids,
                "refused": refused,
                "together": together,
                "launched": launched,
            }
        )
    )


def run(program: str | Path, *, interpreted: bool, cache: Path) -> Any:
    """Return the JSON that ``program`` (a file, or code) prints in a process that has not imported Triton yet."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    command = [sys.executable, "-W", "error", *([str(program)] if isinstance(program, Path) else ["-c", program])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(Path(__file__), interpreted=True, cache=tmp_path_factory.mktemp("triton"))


# The kernel -------------------------------------------------------------------------------------------------


def reference(tensor: Tensor) -> list[float]:
    """Counts, and min, max and norm of the rest, in Python's own floats; +Inf, -Inf and 0 where none is finite."""
    values = tensor.double().flatten().tolist()
    finite = [value for value in values if math.isfinite(value)]
    counts = [sum(map(math.isnan, values)), values.count(INF), values.count(-INF)]
    return [*counts, min(finite, default=INF), max(finite, default=-INF), math.sqrt(math.fsum(v * v for v in finite))]


def assert_equal(numbers: list[float], expected: list[float], name: str) -> None:
    assert numbers[:5] == expected[:5], name
    assert numbers[5] == pytest.approx(expected[5], rel=1.2e-7, abs=0), name


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kernel_finds_what_the_reference_and_the_cpu_find(interpreted: Any, pattern: str) -> None:
    for dtype, numel in KINDS:
        name = f"{pattern}, {dtype}, {numel}"
        tensor, numbers = PATTERNS[pattern](dtype, numel), interpreted["numbers"][name]
        assert_equal(numbers, reference(tensor), name)
        with torch.no_grad():
            cpu = Statistics(on_device=False).measure(tensor)
        assert numbers[:3] == [cpu.nan, cpu.posinf, cpu.neginf], name
        if cpu.min is None:
            assert numbers[3:] == [INF, -INF, 0.0], name
        else:
            assert numbers[3:5] == [cpu.min, cpu.max], name
            assert numbers[5] == pytest.approx(cpu.norm, rel=1e-5, abs=0), name


def test_a_tensor_of_many_blocks_is_read_to_its_end(interpreted: Any) -> None:
    expected = reference(large(torch.float32))
    assert expected[:5] == [1, 1, 1, -9.0, 11.0]
    assert_equal(interpreted["numbers"]["large"], expected, "large")


def test_programs_that_are_fewer_than_the_blocks_take_several_each(interpreted: Any) -> None:
    assert interpreted["few_grids"] == [[4], [4], [4]]
    for dtype, numbers in zip(SIZES, interpreted["few"], strict=True):
        assert_equal(numbers, reference(large(dtype)), str(dtype))


def test_dense_tensors_are_read_in_the_order_of_memory(interpreted: Any) -> None:
    for name, tensor in dense_views().items():
        assert_equal(interpreted["numbers"][name], reference(tensor), name)


def test_the_norm_of_one_number_is_its_magnitude_to_the_bit(interpreted: Any) -> None:
    for dtype, pattern in itertools.product(SIZES, ("finite", "negative", "denormals", "squares that overflow")):
        value = PATTERNS[pattern](dtype, 1).double().item()
        assert interpreted["numbers"][f"{pattern}, {dtype}, 1"][5] == abs(value)


def test_the_order_in_which_programs_finish_changes_nothing(interpreted: Any) -> None:
    sums = [row[5] for row in interpreted["orders"]]
    assert len(sums) == len(ORDERS)
    assert sums[0] == pytest.approx(8 * fused.BLOCK, rel=0.05)
    assert set(sums) == {sums[0]}  # to the last bit


def test_each_tensor_is_one_launch_with_a_program_a_block(interpreted: Any) -> None:
    assert interpreted["notes"] == []
    expected = [[math.ceil(tensor.numel() / fused.BLOCK)] for tensor in all_cases().values()]
    assert interpreted["grids"] == expected


def test_what_the_kernel_cannot_read_goes_the_other_way(interpreted: Any) -> None:
    assert interpreted["refused"] == list(other_tensors())


def test_statistics_take_the_kernel_where_they_can_and_say_the_same_as_on_the_cpu(interpreted: Any) -> None:
    cpu = measured(Statistics(on_device=False))
    assert interpreted["launched"] == len(PATTERNS) + 1  # and the eight bits, which are widened first
    assert interpreted["together"].keys() == cpu.keys()
    for name, numbers in interpreted["together"].items():
        assert numbers[:5] == cpu[name][:5], name
        assert numbers[5] == (None if cpu[name][5] is None else pytest.approx(cpu[name][5], rel=1e-5, abs=0)), name


COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gradtrace.capture.fused_kernel import measure

def compiled(target, kind):
    signature = {"values": kind, "numel": "i32", "rows": "*fp64", "row": "i32", "BLOCK": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(measure, signature, {"BLOCK": 2048}, aligned)
    return triton.compile(source, target=target, options={"num_warps": 8, "enable_fp_fusion": True}).asm

nvidia = {kind: compiled(GPUTarget("cuda", 80, 32), kind) for kind in ("*bf16", "*fp32")}
amd = compiled(GPUTarget("hip", "gfx942", 64), "*bf16")
print(json.dumps({"ptx": {kind: asm["ptx"] for kind, asm in nvidia.items()},
                  "binaries": [len(asm["cubin"]) for asm in nvidia.values()] + [len(amd["hsaco"])]}))
"""


def test_the_kernel_compiles_to_native_atomics_and_wide_reads(tmp_path: Path) -> None:
    answer = run(COMPILE, interpreted=False, cache=tmp_path)
    assert min(answer["binaries"]) > 1000
    for kind, ptx in answer["ptx"].items():
        atomics = [line.split()[1] for line in ptx.splitlines() if " red.global" in line or " atom.global" in line]
        assert sum(name.endswith("add.f64") for name in atomics) == 4, kind
        assert sum("min" in name or "max" in name for name in atomics) == 4, kind  # for either sign
        assert "ld.global.v4.b32" in ptx, kind
        assert ".ftz" not in ptx, kind  # which takes denormals for zero


# The buffer, with a kernel made of PyTorch's operations ------------------------------------------------------


class Kernel:
    """Stands for the compiled kernel; ``broken_from`` is the launch from which on it raises."""

    def __init__(self, broken_from: float = INF) -> None:
        self.launches = 0
        self.broken_from = broken_from

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.run, grid)

    def run(self, grid: tuple[int, ...], values: Tensor, numel: int, rows: Tensor, row: int, **options: Any) -> None:
        self.launches += 1
        if self.launches >= self.broken_from:
            raise RuntimeError("no compiler\nmore of it")
        assert numel == values.numel() and rows[row].tolist() == [0, 0, 0, INF, -INF, 0]
        rows[row] = device_numbers(values)
        rows[row, 5] **= 2


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are taken, as under the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


class Buffer(NamedTuple):
    buffer: FusedBuffer
    kernel: Kernel
    notes: list[str]


@pytest.fixture
def made(on_cpu: None) -> Callable[..., Buffer]:
    def make(broken_from: float = INF) -> Buffer:
        kernel, notes = Kernel(broken_from), list[str]()
        return Buffer(FusedBuffer(note=notes.append, load=lambda: kernel), kernel, notes)

    return make


def rows_of(buffer: FusedBuffer, values: Iterator[float] | list[float]) -> list[Row]:
    rows = [buffer.row_for(torch.tensor(value)) for value in values]
    assert None not in rows
    return [row for row in rows if row is not None]


def maxima(rows: list[Row]) -> list[float]:
    return [numbers[4] for numbers in fetch(rows)]


def test_rows_come_back_in_the_order_asked_for_beside_numbers_of_the_other_way(made: Callable[..., Buffer]) -> None:
    rows = rows_of(made().buffer, [1.0, -3.0, INF])
    other = torch.tensor([0, 0, 0, 2, 5, 7], dtype=torch.float64)
    assert rows[0].device == torch.device("cpu")
    assert fetch([rows[2], other, rows[1]]) == [
        [0, 1, 0, INF, -INF, 0],
        [0, 0, 0, 2, 5, 7],
        [0, 0, 0, -3, -3, 3],
    ]
    assert fetch([other]) == [[0, 0, 0, 2, 5, 7]]


def test_a_full_page_is_followed_by_one_of_twice_its_size_and_the_next_step_starts_with_that(
    made: Callable[..., Buffer],
) -> None:
    buffer = made().buffer
    values = [float(value) for value in range(600)]
    rows = rows_of(buffer, values)
    assert [len(list(group)) for _, group in itertools.groupby(rows, lambda row: id(row.page))] == [256, 344]
    buffer.turn()
    later = rows_of(buffer, values[:512])
    assert {id(row.page) for row in later}.isdisjoint(id(row.page) for row in rows)
    assert len({id(row.page) for row in later}) == 1
    assert maxima(rows[::-1]) == values[::-1]
    assert maxima(later) == values[:512]
    buffer.turn()
    assert len(rows_of(buffer, [1.0])[0].page.rows) == 512  # it does not go on growing


def test_a_row_taken_while_others_are_fetched_is_fetched_later(made: Callable[..., Buffer]) -> None:
    buffer = made().buffer
    rows = rows_of(buffer, [1.0, 2.0])
    buffer.turn()
    assert maxima(rows[:1]) == [1.0]
    assert maxima(rows) == [1.0, 2.0]


def test_threads_share_a_buffer(made: Callable[..., Buffer]) -> None:
    buffer = made().buffer
    taken: dict[int, list[Row]] = {}

    def take(start: int) -> None:
        taken[start] = rows_of(buffer, [float(start + i) for i in range(150)])

    threads = [threading.Thread(target=take, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start, rows in taken.items():
        assert maxima(rows) == [start + i for i in range(150)]


class Operations(TorchDispatchMode):
    """Counts what is not the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


def test_a_tensor_costs_one_launch_and_no_operation_and_a_step_one_copy(
    made: Callable[..., Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, kernel, _ = made()
    tensors = [torch.randn(5), torch.randn(3, 4).t(), torch.tensor([NAN], dtype=torch.float16)]
    buffer.row_for(tensors[0])
    monkeypatch.setattr(Kernel, "run", lambda self, *args, **options: setattr(self, "launches", self.launches + 1))
    before = kernel.launches
    with Operations() as operations:
        rows = [row for row in map(buffer.row_for, tensors) if row is not None]
    assert (len(rows), kernel.launches - before, operations.seen) == (3, 3, [])
    copies: list[Tensor] = []
    monkeypatch.setattr(fused, "_on_host", lambda values: copies.append(values) or values.tolist())
    fetch([*rows, torch.zeros(6, dtype=torch.float64)])
    assert [tuple(values.shape) for values in copies] == [((4 + 1) * 6,)]


# The part that only a CUDA device has, with stand-ins for its streams -----------------------------------------


class Stream:
    """Notes what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def record_event(self) -> str:
        return "the page is made"

    def wait_event(self, event: str) -> None:
        self.waits.append(event)

    def wait_stream(self, stream: Stream) -> None:
        self.waits.append(stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA device whose memory is the CPU's: ``tensor`` says it is on it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    there = SimpleNamespace(stream=Stream(), captured=False, kept_for=[], tensor=OnDevice())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: there.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: there.captured)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: there.kept_for.append(stream))
    monkeypatch.setattr(FusedBuffer, "_prove", lambda self, device: None)

    def page_of_the_device(device: torch.device, length: int) -> fused._Page:
        assert device.type == "cuda"
        page = Page(torch.device("cpu"), length)
        page._ready = there.stream.record_event()
        return page

    Page = fused._Page
    monkeypatch.setattr(fused, "_Page", page_of_the_device)
    return there


class OnDevice:
    """As much of a CUDA tensor as is looked at before the kernel is launched."""

    dtype, is_cuda, device = torch.float32, True, torch.device("cuda", 0)

    def numel(self) -> int:
        return 3

    def is_contiguous(self) -> bool:
        return True

    def is_neg(self) -> bool:
        return False


class Launches:
    """A kernel that notes the rows that it is to fill."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda values, numel, rows, row, **options: self.rows.append(row)


def test_writers_wait_for_the_page_once_and_the_reader_for_all_writers(cuda: SimpleNamespace) -> None:
    kernel = Launches()
    buffer = FusedBuffer(load=lambda: kernel)
    maker, writer, reader = cuda.stream, Stream(), Stream()
    rows = [buffer.row_for(cuda.tensor), buffer.row_for(cuda.tensor)]
    cuda.stream = writer
    rows += [buffer.row_for(cuda.tensor), buffer.row_for(cuda.tensor)]
    assert None not in rows and kernel.rows == [0, 1, 2, 3]
    assert (maker.waits, writer.waits) == (["the page is made"], ["the page is made"])
    assert cuda.kept_for == [maker, writer]
    cuda.stream = reader
    assert rows[0] is not None and rows[0].page.written().shape == (4, 6)
    assert reader.waits == [maker, writer]


def test_a_launch_that_would_become_part_of_a_cuda_graph_is_not_made(cuda: SimpleNamespace) -> None:
    kernel, notes = Launches(), list[str]()
    buffer = FusedBuffer(load=lambda: kernel, note=notes.append)
    cuda.captured = True
    assert buffer.row_for(cuda.tensor) is None
    cuda.captured = False
    assert buffer.row_for(cuda.tensor) is not None
    assert (kernel.rows, notes) == ([0], [])


def test_the_interpreter_does_not_take_tensors_of_a_device(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = Launches()
    assert FusedBuffer(load=lambda: kernel).row_for(cuda.tensor) is None
    assert kernel.rows == []


# The way out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", [1, 2, 4], ids=["the proof", "the first", "a later one"])
def test_after_a_launch_that_fails_nothing_is_launched_and_one_note_says_so(
    made: Callable[..., Buffer], launch: int
) -> None:
    buffer, kernel, notes = made(broken_from=launch)
    rows = [buffer.row_for(torch.tensor([1.0, 2.0])) for _ in range(6)]
    assert [row is not None for row in rows] == [number < launch - 2 for number in range(6)]
    assert kernel.launches == launch
    assert notes == [
        "the fused kernel cannot be used (RuntimeError: no compiler); tensors of the accelerator are measured with "
        "PyTorch's own operations: the same numbers, slower"
    ]
    for row in rows[: max(0, launch - 2)]:
        assert row is not None and fetch([row])[0][4] == 2.0


def test_a_kernel_that_computes_something_else_is_not_used(
    made: Callable[..., Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, _, notes = made()
    monkeypatch.setattr(Kernel, "run", lambda self, *args, **options: None)
    assert [buffer.row_for(torch.ones(2)), buffer.row_for(torch.ones(2))] == [None, None]
    assert len(notes) == 1
    assert "(ArithmeticError: it gave wrong numbers for known values)" in notes[0]


def test_without_triton_one_warning_is_all_that_happens(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "gradtrace.capture.fused_kernel", raising=False)
    buffer = FusedBuffer()
    with pytest.warns(GradtraceWarning) as warned:
        assert [buffer.row_for(torch.ones(3)) for _ in range(3)] == [None] * 3
    assert [str(w.message).partition("; tensors")[0] for w in warned] == [
        "the fused kernel cannot be used (ModuleNotFoundError: import of triton halted; None in sys.modules)"
    ]


def test_a_warning_made_an_error_does_not_reach_the_training(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "gradtrace.capture.fused_kernel", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FusedBuffer().row_for(torch.ones(3)) is None


def test_a_tensor_of_the_cpu_is_not_taken_and_triton_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    loads: list[int] = []
    buffer = FusedBuffer(load=lambda: loads.append(1))
    assert buffer.row_for(torch.ones(3)) is None
    assert loads == []


if __name__ == "__main__":
    main()
