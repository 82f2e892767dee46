"""Tensors of every kind for tests of the statistics, and what their statistics are, in exact arithmetic."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BITS = (
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
TYPES = (*FLOATS, *EIGHT_BITS, *COMPLEX, *INTEGERS)
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 1023, 1025)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LARGEST = sys.float_info.max


class Expected(NamedTuple):
    """Counts of NaN, +Inf and -Inf, and min, max and norm of the finite elements, None where there is none."""

    nan: int
    posinf: int
    neginf: int
    min: float | None
    max: float | None
    norm: float | None


def expected(tensor: Tensor) -> Expected:
    """Return the statistics of a dense tensor, from Python's own numbers; of complex elements those of magnitudes."""
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    if tensor.dtype in INTEGERS:
        numbers = flat.tolist()
        return Expected(0, 0, 0, *((float(min(numbers)), float(max(numbers))) if numbers else (None, None)), None)
    if tensor.dtype in COMPLEX:
        parts = torch.view_as_real(flat.to(torch.complex128)).tolist()
        values = [_magnitude(real, imaginary) for real, imaginary in parts]
    else:
        values = flat.double().tolist()
    return expected_of(values)


def expected_of(values: list[float]) -> Expected:
    """Return the statistics of floats."""
    finite = [value for value in values if math.isfinite(value)]
    counts = sum(map(math.isnan, values)), values.count(math.inf), values.count(-math.inf)
    return Expected(*counts, min(finite, default=None), max(finite, default=None), _norm(finite) if finite else None)


def _magnitude(real: float, imaginary: float) -> float:
    size = math.hypot(real, imaginary)
    return min(size, LARGEST) if math.isfinite(real) and math.isfinite(imaginary) else size


def _norm(values: list[float]) -> float:
    """Return the L2 norm to the last bit or so: scaled by a power of two, which is exact, and added up exactly."""
    largest = max(map(abs, values))
    power = math.frexp(largest)[1]
    total = math.fsum(math.ldexp(value, -power) ** 2 for value in values)
    try:
        return math.ldexp(math.sqrt(total), power)
    except OverflowError:
        return LARGEST


class Case(NamedTuple):
    """A tensor as the training has it, and a dense one with the same elements, which a test reads."""

    name: str
    tensor: Tensor
    dense: Tensor


@st.composite
def cases(draw: Callable[[Any], Any]) -> Case:
    """Return a strategy for cases: any type, contents, size and layout."""
    dtype = draw(st.sampled_from(TYPES))
    content = draw(st.sampled_from(tuple(_CONTENTS)))
    layout = draw(st.sampled_from(tuple(_LAYOUTS)))
    size = draw(st.sampled_from(SIZES))
    seed = draw(st.integers(0, 2**32 - 1))
    return case(dtype, content, layout, size, seed)


def case(dtype: torch.dtype, content: str, layout: str, size: int, seed: int) -> Case:
    """Return one case; the same arguments give the same."""
    random = torch.Generator().manual_seed(seed)
    base = _CONTENTS[content](dtype, size, random)
    tensor = _LAYOUTS[layout](base)
    name = f"{dtype}, {content}, {layout}, {size}, {seed}"
    plain = tensor.detach().resolve_conj().resolve_neg()
    return Case(name, tensor, plain.clone(memory_format=torch.contiguous_format).flatten())


def _of_bits(dtype: torch.dtype, size: int, random: torch.Generator) -> Tensor:
    """Any bits: all NaNs with their payloads, denormals, both zeros, all magnitudes."""
    width = dtype.itemsize
    words = torch.randint(0, 256, (size * width,), generator=random, dtype=torch.uint8)
    return words.view(dtype) if size else torch.empty(0, dtype=dtype)


def _plain(dtype: torch.dtype, size: int, random: torch.Generator) -> Tensor:
    return (torch.randn(size, generator=random, dtype=torch.float64) * 3).abs().add(1).to(_real(dtype)).to(dtype)


def _extremes(dtype: torch.dtype, size: int, random: torch.Generator) -> Tensor:
    """The largest, the smallest, what squares to nothing or to infinity, and zeros of both signs."""
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        pool = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    else:
        limits = torch.finfo(_real(dtype))
        sizes = [
            limits.max,
            limits.tiny,
            limits.tiny * limits.eps,
            math.sqrt(limits.max) * 2,
            math.sqrt(limits.tiny) / 4,
        ]
        signed = [sign * one for one in sizes for sign in (1.0, -1.0)]
        pool = torch.tensor([*signed, 0.0, -0.0, 1.0], dtype=torch.float64).to(_real(dtype)).to(dtype)
    return pool[torch.randint(0, len(pool), (size,), generator=random)]


def _specials(dtype: torch.dtype, size: int, random: torch.Generator) -> Tensor:
    """Ordinary numbers with NaN and both infinities among them, as far as the type has such."""
    if dtype in INTEGERS:
        return _plain(dtype, size, random)
    pool = torch.tensor([math.nan, math.inf, -math.inf, 0.5, 2.0, 8.0, 1.0], dtype=torch.float64)
    pool = pool.to(_real(dtype)).to(dtype)
    return pool[torch.randint(0, len(pool), (size,), generator=random)]


def _uneven(dtype: torch.dtype, size: int, random: torch.Generator) -> Tensor:
    """Magnitudes over the whole range of the type."""
    if dtype in INTEGERS:
        return _of_bits(dtype, size, random)
    limits = torch.finfo(_real(dtype))
    low, high = math.log2(limits.tiny) + 1, math.log2(limits.max) - 1
    powers = torch.rand(size, generator=random, dtype=torch.float64) * (high - low) + low
    return torch.exp2(powers).to(_real(dtype)).to(dtype)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


_CONTENTS: dict[str, Callable[[torch.dtype, int, torch.Generator], Tensor]] = {
    "any bits": _of_bits, "plain": _plain, "extremes": _extremes, "specials": _specials, "uneven": _uneven,
}  # fmt: skip


def _matrix(base: Tensor) -> Tensor:
    columns = max(1, math.isqrt(base.numel()))
    return base[: base.numel() // columns * columns].view(-1, columns)


def _overlapping(base: Tensor) -> Tensor:
    count = (base.numel() + 1) // 2
    return base.as_strided((count, count), (1, 1)) if 0 < count < 40 else base


def _channels_last(base: Tensor) -> Tensor:
    used = base[: base.numel() // 6 * 6].view(-1, 3, 2, 1)
    return used.to(memory_format=torch.channels_last)


def _negated(base: Tensor) -> Tensor:
    can = base.dtype in (*FLOATS, *COMPLEX)
    return torch._neg_view(base) if can else base


def _conjugated(base: Tensor) -> Tensor:
    return base.conj() if base.dtype in COMPLEX else base


def _imaginary(base: Tensor) -> Tensor:
    """The imaginary part of a conjugate: a negated view with strides."""
    return base.conj().imag if base.dtype in (torch.complex64, torch.complex128) else base


def _with_gradient(base: Tensor) -> Tensor:
    can = base.dtype in (*FLOATS, torch.complex64, torch.complex128)
    return base.clone().requires_grad_() if can else base


def _of_inference(base: Tensor) -> Tensor:
    with torch.inference_mode():
        return base.clone()


class Subclass(Tensor):
    """A tensor with a behaviour of its own."""


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda base: base,
    "matrix": _matrix,
    "transposed": lambda base: _matrix(base).t(),
    "every second": lambda base: base[::2],
    "offset": lambda base: base[1:],
    "columns": lambda base: _matrix(base)[:, ::3],
    "sizes of one": lambda base: base.view(-1, 1, 1).permute(1, 0, 2),
    "scalar": lambda base: base[0] if base.numel() else base,
    "expanded": lambda base: base.unsqueeze(0).expand(3, -1),
    "expanded scalar": lambda base: base[:1].expand(50) if base.numel() else base,
    "expanded inside": lambda base: base.view(-1, 1).expand(-1, 4).t(),
    "overlapping": _overlapping,
    "channels last": _channels_last,
    "flipped": lambda base: base.flip(0) if base.dtype in FLOATS else base,
    "negated": _negated,
    "conjugated": _conjugated,
    "imaginary": _imaginary,
    "with gradient": _with_gradient,
    "of inference": _of_inference,
    "parameter": lambda base: torch.nn.Parameter(base.clone(), requires_grad=False),
    "subclass": lambda base: base.as_subclass(Subclass),
}
CONTENTS, LAYOUTS = tuple(_CONTENTS), tuple(_LAYOUTS)
