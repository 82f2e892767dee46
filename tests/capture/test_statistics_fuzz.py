"""Statistics of tensors of every type, layout and content against exact arithmetic, on the CPU's way and the device's.

The same strategy runs for long in ``tests/soak/test_statistics.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrace.capture.session import quiet
from gradtrace.capture.statistics import Measure, Statistics, Unmeasurable
from tests.tensors import COMPLEX, CONTENTS, LARGEST, LAYOUTS, TYPES, Case, Expected, case, cases, expected

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def measured(tensor: Tensor, *, on_device: bool) -> Measure:
    statistics = Statistics(on_device=on_device)
    with quiet():
        measure = statistics.measure(tensor)
        statistics.resolve()
    assert not measure.pending
    return measure


def assert_right(one: Case, want: Expected, measure: Measure) -> None:
    """Counts have to be equal, extremes too but for the rounding of a magnitude, norms to single precision."""
    assert (measure.nan, measure.posinf, measure.neginf) == want[:3], one.name
    assert measure.numel == one.tensor.numel(), one.name
    if want.min is None:
        assert (measure.min, measure.max, measure.norm) == (None, None, None), one.name
        return
    slack = 4e-16 if one.tensor.dtype in COMPLEX else 0.0
    assert measure.min == pytest.approx(want.min, rel=slack, abs=0.0), one.name
    assert measure.max == pytest.approx(want.max, rel=slack, abs=0.0), one.name
    precise = one.tensor.dtype in (torch.float64, *COMPLEX)
    norm = None if want.norm is None else pytest.approx(want.norm, rel=1e-12 if precise else 1e-5, abs=1e-323)
    assert measure.norm == norm, one.name
    assert measure.norm is None or 0 <= measure.norm <= LARGEST, one.name


def check(one: Case) -> None:
    want = expected(one.dense)
    for on_device in (False, True):
        assert_right(one, want, measured(one.tensor, on_device=on_device))
    finite = not sum(want[:3])
    with quiet():
        assert Statistics().all_finite(one.tensor) is finite, one.name
        assert finite or not Statistics().surely_finite([one.tensor]), one.name


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(one=cases())
def test_any_tensor_is_measured_as_exact_arithmetic_does(one: Case) -> None:
    check(one)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_in_every_layout_and_of_every_content(dtype: torch.dtype) -> None:
    for number, layout in enumerate(LAYOUTS):
        for content in CONTENTS:
            check(case(dtype, content, layout, 17, number))


def test_no_type_of_torch_brings_anything_but_numbers_or_a_reason() -> None:
    types = {one for name in dir(torch) if isinstance(one := getattr(torch, name), torch.dtype)}
    refused = set()
    for dtype in sorted(types, key=str):
        tensor = torch.zeros(16, dtype=torch.uint8).view(dtype) if dtype.itemsize <= 16 else None
        assert tensor is not None
        try:
            measured(tensor, on_device=False)
        except Unmeasurable as reason:
            assert str(reason) == f"{str(dtype).removeprefix('torch.')} tensor"
            refused.add(dtype)
            for look in (Statistics().all_finite, Statistics().total):
                with pytest.raises(Unmeasurable):
                    look(tensor)
    assert refused.isdisjoint(TYPES) and torch.float4_e2m1fn_x2 in refused
    assert types - refused == set(TYPES)


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    # What use_deterministic_algorithms does, which imports a compiler first. Memory is filled with NaN then.
    torch._C._set_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SpoiledFunctions(TorchFunctionMode):
    """A mode of the user's in which every number is another one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("measured through a mode of the user's")


class SpoiledKernels(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("measured through a mode of the user's")


CIRCUMSTANCES: dict[str, Any] = {
    "float64 by default": lambda: default_type(torch.float64),
    "float16 by default": lambda: default_type(torch.float16),
    "deterministic": deterministic,
    "one thread": lambda: threads(1),
    "three threads": lambda: threads(3),
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "a function mode": SpoiledFunctions,
    "a dispatch mode": SpoiledKernels,
    "a default device": lambda: torch.device("meta"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_what_is_set_for_the_training_changes_no_number(name: str) -> None:
    several = [case(dtype, content, "columns", 129, 7) for dtype in TYPES for content in CONTENTS]
    several.append(case(torch.float32, "uneven", "flat", 1025, 3))
    wanted = [expected(one.dense) for one in several]
    for on_device in (False, True):
        with CIRCUMSTANCES[name]():
            found = [measured(one.tensor, on_device=on_device) for one in several]
        for one, want, measure in zip(several, wanted, found, strict=True):
            assert_right(one, want, measure)


def test_where_denormals_are_flushed_they_may_count_as_zero_and_nothing_else_changes() -> None:
    several = [case(dtype, content, "flat", 65, 1) for dtype in (torch.float32, torch.float64) for content in CONTENTS]
    wanted = [expected(one.dense) for one in several]
    for on_device in (False, True):
        assert torch.set_flush_denormal(True)
        try:
            found = [measured(one.tensor, on_device=on_device) for one in several]
        finally:
            torch.set_flush_denormal(False)
        for one, want, measure in zip(several, wanted, found, strict=True):
            tiny = torch.finfo(one.tensor.dtype).tiny
            assert (measure.nan, measure.posinf, measure.neginf) == want[:3], one.name
            assert measure.min == pytest.approx(want.min, rel=0, abs=tiny), one.name
            assert measure.max == pytest.approx(want.max, rel=0, abs=tiny), one.name
            assert measure.norm == pytest.approx(want.norm, rel=1e-5, abs=65 * tiny), one.name


@pytest.mark.parametrize("on_device", [False, True])
def test_what_expand_repeats_is_read_once_and_counted_as_often(on_device: bool) -> None:
    tensor = torch.tensor([[3.0], [float("nan")], [-4.0]]).expand(3, 10**15)
    measure = measured(tensor, on_device=on_device)
    assert (measure.numel, measure.nan, measure.min, measure.max) == (3 * 10**15, 10**15, -4.0, 3.0)
    assert measure.norm == pytest.approx(5 * 10**7.5, rel=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layout", ["flat", "channels last", "every second"])
def test_the_norm_of_many_equal_elements_loses_no_digits(layout: str, on_device: bool) -> None:
    """Each sum of squares in float32 leaves off a little more of what is added last."""
    count = 5_000_000
    tensors = {
        "flat": lambda: torch.full((count,), 0.1),
        "channels last": lambda: torch.full((100, count // 10_000, 100, 1), 0.1).permute(0, 2, 3, 1),
        "every second": lambda: torch.full((2 * count,), 0.1)[::2],
    }
    measure = measured(tensors[layout](), on_device=on_device)
    assert measure.norm == pytest.approx(torch.tensor(0.1).double().item() * count**0.5, rel=2e-5)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_magnitude_or_norm_beyond_all_doubles_is_the_largest_and_not_infinite(on_device: bool) -> None:
    parts = measured(torch.tensor([complex(1.7e308, -1.7e308)], dtype=torch.complex128), on_device=on_device)
    assert (parts.finite, parts.max, parts.norm) == (True, LARGEST, LARGEST)
    many = measured(torch.full((9,), -LARGEST, dtype=torch.float64), on_device=on_device)
    assert (many.finite, many.min, many.norm) == (True, -LARGEST, LARGEST)


@pytest.mark.parametrize("on_device", [False, True])
def test_the_largest_unsigned_integers_are_not_negative(on_device: bool) -> None:
    measure = measured(torch.tensor([2**64 - 1, 5], dtype=torch.uint64), on_device=on_device)
    assert (measure.min, measure.max, measure.norm) == (5.0, float(2**64 - 1), None)
