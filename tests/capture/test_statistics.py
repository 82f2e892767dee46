"""Statistics of tensors against a float64 NumPy reference, on the CPU's way and on the accelerator's."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gradtrace.capture.statistics import Measure, Statistics, Unmeasurable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
BOTH_WAYS = pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
NAN, INF = math.nan, math.inf


def measured(tensor: Tensor, on_device: bool = False) -> Measure:
    statistics = Statistics(on_device=on_device)
    with torch.no_grad():
        measure = statistics.measure(tensor)
        assert measure.pending == (on_device and measure.numel > 0)
        statistics.resolve()
    assert not measure.pending
    return measure


def reference(values: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Counts of NaN, +Inf and -Inf, and min, max and norm of the rest, all in float64."""
    values = values.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    counts = (int(np.isnan(values).sum()), int((values == np.inf).sum()), int((values == -np.inf).sum()))
    if not finite.size:
        return (*counts, None, None, None)
    largest = np.abs(finite).max()
    with np.errstate(over="ignore"):  # beyond all doubles it is the largest of them
        norm = min(largest * np.sqrt(np.square(finite / largest).sum()), sys.float_info.max) if largest else 0.0
    return (*counts, finite.min(), finite.max(), norm)


def assert_measured(measure: Measure, expected: tuple[Any, ...], rel: float = 1e-6) -> None:
    assert (measure.nan, measure.posinf, measure.neginf) == expected[:3]
    assert measure.finite == (sum(expected[:3]) == 0)
    if expected[3] is None:
        assert (measure.min, measure.max, measure.norm) == (None, None, None)
        return
    assert (measure.min, measure.max) == expected[3:5]
    assert measure.norm == pytest.approx(expected[5], rel=rel, abs=0)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("special", [(), (NAN,), (INF,), (-INF,), (NAN, INF, -INF, INF)], ids=str)
def test_floating_tensors_are_counted_and_measured(
    dtype: torch.dtype, special: tuple[float, ...], on_device: bool
) -> None:
    plain = torch.linspace(-3.0, 5.0, 37, dtype=torch.float64)
    tensor = torch.cat([plain, torch.tensor(special, dtype=torch.float64)]).to(dtype)
    measure = measured(tensor, on_device)
    assert (measure.dtype, list(measure.shape), measure.numel) == (dtype, [37 + len(special)], 37 + len(special))
    assert_measured(measure, reference(tensor.double().numpy()))


@BOTH_WAYS
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_eight_bit_floats_are_measured(dtype: torch.dtype, on_device: bool) -> None:
    tensor = torch.tensor([1.5, -2.0, NAN, 0.25]).to(dtype)
    assert_measured(measured(tensor, on_device), (1, 0, 0, -2.0, 1.5, math.sqrt(1.5**2 + 2.0**2 + 0.25**2)))


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_of_complex_tensors_the_magnitudes_are_measured(dtype: torch.dtype, on_device: bool) -> None:
    tensor = torch.tensor([3 + 4j, 0j, -6 + 8j, complex(NAN, 1), complex(0, -INF)], dtype=dtype)
    measure = measured(tensor, on_device)
    assert_measured(measure, (1, 1, 0, 0.0, 10.0, math.sqrt(25 + 100)))
    assert measure.dtype is dtype
    conjugated = measured(tensor[:3].conj(), on_device)
    assert_measured(conjugated, (0, 0, 0, 0.0, 10.0, math.sqrt(25 + 100)))


@BOTH_WAYS
def test_a_magnitude_beyond_the_elements_own_range_is_finite(on_device: bool) -> None:
    tensor = torch.tensor([complex(3e38, 3e38)], dtype=torch.complex64)
    measure = measured(tensor, on_device)
    assert measure.finite
    assert measure.max == pytest.approx(3e38 * math.sqrt(2))


@BOTH_WAYS
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_of_integers_only_the_extremes_are_taken(dtype: torch.dtype, on_device: bool) -> None:
    measure = measured(torch.tensor([[3, 100], [7, 1]]).to(dtype), on_device)
    assert (measure.min, measure.max, measure.norm) == (1.0, 100.0, None)
    assert (measure.nan, measure.posinf, measure.neginf, measure.numel) == (0, 0, 0, 4)


@BOTH_WAYS
def test_a_label_of_minus_hundred_is_seen(on_device: bool) -> None:
    measure = measured(torch.tensor([5, -100, 2]), on_device)
    assert (measure.min, measure.max) == (-100.0, 5.0)


@BOTH_WAYS
@pytest.mark.parametrize("values", [[0.0, NAN], [-0.0, 0.0, INF], [-0.0], [0.0], [-0.0, -0.0]])
def test_the_norm_of_zeros_has_no_sign(values: list[float], on_device: bool) -> None:
    norm = measured(torch.tensor(values), on_device).norm
    assert norm == 0.0
    assert math.copysign(1.0, norm) == 1.0


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.int64], ids=str)
def test_an_empty_tensor_has_counts_but_no_numbers(dtype: torch.dtype, on_device: bool) -> None:
    measure = measured(torch.empty(3, 0, dtype=dtype), on_device)
    assert (measure.numel, list(measure.shape)) == (0, [3, 0])
    assert_measured(measure, (0, 0, 0, None, None, None))


@BOTH_WAYS
@pytest.mark.parametrize("value", [-2.5, NAN, INF, -INF, 0.0])
def test_a_tensor_without_dimensions_is_measured(value: float, on_device: bool) -> None:
    measure = measured(torch.tensor(value), on_device)
    assert (measure.numel, list(measure.shape)) == (1, [])
    assert_measured(measure, reference(np.array([value])))


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state:UserWarning")
@BOTH_WAYS
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_of_sparse_tensors_the_stored_values_are_measured(layout: str, on_device: bool) -> None:
    dense = torch.tensor([[0.0, 3.0, 0.0, 0.0], [NAN, 0.0, 0.0, -4.0]])
    blocks = {"blocksize": (1, 1)} if layout in ("bsr", "bsc") else {}
    sparse = dense.to_sparse() if layout == "coo" else getattr(dense, f"to_sparse_{layout}")(**blocks)
    measure = measured(sparse, on_device)
    assert (measure.numel, list(measure.shape)) == (3, [2, 4])
    assert_measured(measure, (1, 0, 0, -4.0, 3.0, 5.0))


@BOTH_WAYS
def test_a_sparse_tensor_with_a_place_named_twice_is_measured(on_device: bool) -> None:
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, INF], (3,), check_invariants=True)
    assert_measured(measured(sparse, on_device), (0, 1, 0, 2.0, 2.0, 2.0))


@BOTH_WAYS
def test_views_of_all_kinds_are_measured_as_they_look(on_device: bool) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    imaginary = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, -5.0]])).conj().imag
    views = [
        base.t(),
        base[::2, 1::3],
        base[1:2].expand(5, 6),
        base.flip(0),
        base.as_strided((3, 3), (2, 1)),
        imaginary,
    ]
    for view in views:
        assert_measured(measured(view, on_device), reference(view.resolve_neg().numpy()))


@BOTH_WAYS
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [3e38, -3e38, 1.0]),
        (torch.float32, [1e-40, -2e-40, 0.0]),
        (torch.float32, [1e-23, 2e-23]),
        (torch.float32, [1e25, 1.0]),
        (torch.float16, [65504.0] * 50),
        (torch.bfloat16, [3e38] * 50),
        (torch.float64, [1e300, -1e300, 5.0]),
        (torch.float64, [5e-324, -1e-323]),
        (torch.float64, [1e-200, 2e-200]),
        (torch.float32, [-0.0, -0.0]),
    ],
    ids=str,
)
def test_squares_that_overflow_or_vanish_do_not_spoil_the_norm(
    dtype: torch.dtype, values: list[float], on_device: bool
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert_measured(measured(tensor, on_device), reference(tensor.double().numpy()))


@BOTH_WAYS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_tensors_keep_their_precision(dtype: torch.dtype, on_device: bool) -> None:
    tensor = torch.rand(1_000_003, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_measured(measured(tensor, on_device), reference(tensor.double().numpy()), rel=1e-5)
    spoiled = tensor.clone()
    spoiled[[0, 500_000, -1]] = torch.tensor([NAN, INF, -INF], dtype=dtype)
    assert_measured(measured(spoiled, on_device), reference(spoiled.double().numpy()), rel=1e-5)


NUMPY_TYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(list(NUMPY_TYPES)),
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=0, max_size=40),
    on_device=st.booleans(),
)
def test_any_numbers_are_measured_as_the_reference_does(
    dtype: torch.dtype, values: list[float], on_device: bool
) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype=np.float64).astype(NUMPY_TYPES[dtype])
        expected = reference(array)
    assert_measured(measured(torch.from_numpy(array), on_device), expected, rel=1e-5)


def test_both_ways_agree_on_mixed_tensors_resolved_together() -> None:
    tensors = [
        torch.randn(5, 3),
        torch.tensor([NAN, 1.0], dtype=torch.float16),
        torch.tensor([1, 2, 3]),
        torch.zeros(0),
        torch.tensor([1 + 1j]),
        torch.tensor(INF, dtype=torch.float64),
    ]
    device, host = Statistics(on_device=True), Statistics(on_device=False)
    with torch.no_grad():
        waiting = [device.measure(tensor) for tensor in tensors]
        assert device.waiting == 5  # not the empty one
        assert all(m.min is None and m.norm is None for m in waiting)
        device.resolve()
        for late, tensor in zip(waiting, tensors, strict=True):
            now = host.measure(tensor)
            expected = (now.nan, now.posinf, now.neginf, now.min, now.max)
            assert (late.nan, late.posinf, late.neginf, late.min, late.max) == expected
            assert late.norm == (None if now.norm is None else pytest.approx(now.norm, rel=1e-6))
    assert device.waiting == 0


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(3, device="meta"), "meta tensor"),
        (lambda: torch.ones(3, dtype=torch.bool), "bool tensor"),
        (quantized, "quint8 tensor"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "torch._mkldnn layout"),
    ],
    ids=["meta", "bool", "quantized", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning", "ignore:.*quantiz.*:UserWarning")
@BOTH_WAYS
def test_what_holds_no_readable_numbers_is_refused_with_a_reason(make: Any, reason: str, on_device: bool) -> None:
    statistics = Statistics(on_device=on_device)
    with torch.no_grad(), pytest.raises(Unmeasurable, match=reason):
        statistics.measure_once(make())
    assert statistics.waiting == 0


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_of_nested_tensors_the_jagged_are_measured_and_the_strided_refused() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([NAN, -3.0, 0.5])]
    with pytest.raises(Unmeasurable, match="nested"):
        measured(torch.nested.nested_tensor(parts))
    assert_measured(
        measured(torch.nested.nested_tensor(parts, layout=torch.jagged)),
        reference(torch.cat(parts).double().numpy()),
    )


def test_a_subclass_is_measured_without_its_own_behaviour() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in ("aminmax", "linalg_vector_norm", "item"):
                raise AssertionError("measured through the subclass")
            return super().__torch_function__(function, types, args, kwargs or {})

    assert_measured(measured(torch.tensor([3.0, -4.0]).as_subclass(Loud)), (0, 0, 0, -4.0, 3.0, 5.0))


def test_inference_tensors_are_measured_every_time() -> None:
    with torch.inference_mode():
        tensor = torch.tensor([1.0, 2.0])
        statistics = Statistics()
        assert statistics.measure_once(tensor).max == 2.0
        tensor.fill_(7.0)
        assert statistics.measure_once(tensor).max == 7.0


@BOTH_WAYS
def test_a_tensor_is_measured_once_until_it_is_changed(on_device: bool) -> None:
    statistics = Statistics(on_device=on_device)
    tensor = torch.tensor([1.0, 2.0])
    first = statistics.measure_once(tensor)
    assert statistics.measure_once(tensor) is first
    assert statistics.measure_once(tensor.view(2)) is not first
    tensor.view(2).add_(5.0)
    second = statistics.measure_once(tensor)
    statistics.resolve()
    assert (first.max, second.max) == (2.0, 7.0)
    statistics.forget()
    assert statistics.measure_once(tensor) is not second
    statistics.resolve()


def test_a_new_tensor_at_the_place_of_a_dead_one_is_measured_anew() -> None:
    statistics = Statistics()
    places, reused = {}, 0
    for value in range(200):
        tensor = torch.full((3,), float(value))
        reused += id(tensor) in places
        places[id(tensor)] = value
        assert statistics.measure_once(tensor).max == value
        del tensor
    assert reused > 100


def test_measured_tensors_are_not_kept_alive() -> None:
    for on_device in (False, True):
        statistics = Statistics(on_device=on_device)
        tensor = torch.ones(1000)
        alive = weakref.ref(tensor)
        gc.disable()
        try:
            statistics.measure_once(tensor)
            del tensor
            assert alive() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("value", [0.1, -3.0, 0.0, NAN, INF, -INF])
def test_a_python_number_is_measured_without_a_tensor(value: float) -> None:
    measure = Measure.of_number(value)
    assert_measured(measure, reference(np.array([value])))
    assert (measure.numel, list(measure.shape), measure.pending) == (1, [], False)


@pytest.mark.parametrize(
    ("tensor", "finite"),
    [
        (torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, NAN]), False),
        (torch.tensor([-INF, 2.0]), False),
        (torch.tensor([complex(1, INF)]), False),
        (torch.tensor([[0.0, NAN]]).to_sparse(), False),
        (torch.empty(0), True),
        (torch.tensor([1, 2]), True),
        (torch.tensor([NAN]).to(torch.float8_e5m2), False),
    ],
)
def test_the_quick_look_tells_finite_from_not(tensor: Tensor, finite: bool) -> None:
    assert Statistics().all_finite(tensor) is finite


def test_measuring_leaves_the_random_state_and_the_tensor_alone() -> None:
    tensor = torch.randn(100, requires_grad=True)
    state, version = torch.get_rng_state(), tensor._version
    for on_device in (False, True):
        measured(tensor, on_device)
    assert torch.equal(torch.get_rng_state(), state)
    assert (tensor._version, tensor.grad_fn, tensor.grad) == (version, None, None)


@pytest.mark.parametrize("numel", [100_000, 6_000_000])
def test_the_norm_of_a_large_tensor_with_strides_is_as_precise_as_any(numel: int) -> None:
    values = torch.rand(2 * numel, generator=torch.Generator().manual_seed(0))[::2]
    with torch.no_grad():
        norm = Statistics().measure(values).norm
    assert norm == pytest.approx(values.double().square().sum().sqrt().item(), rel=1e-6)


def copies_made(tensor: Tensor) -> set[str]:
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        Statistics().measure(tensor)
    return {"aten::clone", "aten::contiguous", "aten::copy_"}.intersection(e.name for e in profiler.events())


DENSE: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(30, 50).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(4, 5, 6).permute(2, 0, 1),
    "a single row": lambda: torch.randn(6, 1).t(),
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE.keys())
def test_a_tensor_without_gaps_is_read_as_it_lies_in_memory(make: Callable[[], Tensor]) -> None:
    tensor = make()
    assert copies_made(tensor) == set()
    assert_measured(measured(tensor), reference(tensor.double().numpy()))


def test_a_tensor_with_gaps_is_measured_right() -> None:
    tensor = torch.arange(60.0).view(6, 10)[:, ::3]
    assert_measured(measured(tensor), reference(tensor.double().numpy()))
    assert_measured(measured(torch.tensor([3.0]).expand(4)), (0, 0, 0, 3.0, 3.0, 6.0))


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], True),
        ([torch.ones(3), torch.ones(2, 2)], True),
        ([torch.ones(3), torch.tensor([1.0, NAN])], False),
        ([torch.tensor([INF]), torch.tensor([-INF])], False),
        ([torch.ones(3), torch.ones(3).double()], False),  # what cannot be seen in one look is not sure
        ([torch.full((4,), 60_000.0).half()] * 2, False),
        ([torch.ones(3).to_sparse()], False),
        ([torch.ones(3, dtype=torch.complex64)], False),
    ],
)
def test_one_look_tells_that_all_is_finite_or_says_nothing(tensors: list[Tensor], expected: bool) -> None:
    assert Statistics().surely_finite(tensors) is expected


def test_on_an_accelerator_nobody_looks() -> None:
    assert Statistics(on_device=True).surely_finite([torch.ones(3)]) is False
