"""The numbers of a floating tensor on the CPU, where a look at a value costs next to nothing.

Two fast passes (``aminmax`` and a norm) give everything about a finite tensor. The exact counts run only when those
say that something is wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrace.capture.measures import Kind, Measure, within_doubles
from gradtrace.capture.readable import in_memory_order, once

_SAFE_LARGEST = 1e14
"""Largest magnitude whose squares, summed over 1e10 elements, stay below float32's limit of 3.4e38."""
_SAFE_SMALLEST = 1e-12
"""Smallest largest-magnitude whose squares float32 still holds with its full precision."""
_LARGEST_COPY = 4_000_000
"""Number of elements up to which a tensor is copied rather than added up in float64, which is slower."""
_LARGEST_SUM = 1 << 18
"""Number of squares that are added up in float32; of more the parts are added up as doubles, which takes as long.

All at once the norm of 300 million equal elements is off by 2 %.
"""
_LARGEST_POWER = 126
"""Scaling by a power of two up to this one is exact in float32."""

_aminmax = torch.aminmax
_dot = torch.dot
_vector_norm = torch._C._linalg.linalg_vector_norm  # type: ignore[attr-defined]
_sqrt = math.sqrt
_INFINITE = math.inf
_SINGLE = torch.float32


def read(kind: Kind, values: Tensor) -> Measure:
    """Return the measure of ``values``, of a floating type and not empty; ``kind`` is that of their tensor."""
    if not values.is_contiguous():
        values, copies = once(values)
        if copies > 1:
            return _repeated(read(kind, values), copies)
        values = in_memory_order(values)
    low_tensor, high_tensor = _aminmax(values)
    low, high = low_tensor.item(), high_tensor.item()
    largest = -low if -low > high else high
    if _SAFE_SMALLEST < largest < _SAFE_LARGEST and kind.is_single and values.is_contiguous():
        # The dot product of a flat tensor with itself is as precise as vector_norm, and faster.
        flat = values if kind.is_flat else values.view(-1)
        if kind.numel > _LARGEST_SUM:
            return Measure(kind, low, high, _norm_of_single(flat))
        return Measure(kind, low, high, _sqrt(_dot(flat, flat).item()))
    if low > -_INFINITE and high < _INFINITE:  # neither is NaN, which both would be
        return Measure(kind, low, high, _norm(values, largest))
    return _read_nonfinite(kind, values)


def _repeated(measure: Measure, copies: int) -> Measure:
    """Return the measure of a tensor that holds each element ``copies`` times."""
    if measure.counts is not None:
        nan, posinf, neginf = measure.counts
        measure.counts = nan * copies, posinf * copies, neginf * copies
    if measure.norm is not None:
        measure.norm = within_doubles(measure.norm * _sqrt(copies))
    return measure


def _read_nonfinite(kind: Kind, values: Tensor) -> Measure:
    counts = (
        int(torch.isnan(values).sum().item()),
        int(torch.isposinf(values).sum().item()),
        int(torch.isneginf(values).sum().item()),
    )
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return Measure(kind, counts=counts)
    low_tensor, high_tensor = _aminmax(finite)
    low, high = low_tensor.item(), high_tensor.item()
    return Measure(kind, low, high, _norm(finite, max(-low, high)), counts)


def _norm(values: Tensor, largest: float) -> float:
    """Return the L2 norm of finite values; ``largest`` is their largest magnitude."""
    numel, dtype = values.numel(), values.dtype
    if numel == 1 or largest == 0.0:
        return abs(largest)  # of zeros it may be -0.0
    if dtype is torch.float64:
        if 1e-140 < largest < 1e140:
            return float(_vector_norm(values).item())
        return within_doubles(largest * float(_vector_norm(values / largest).item()))
    if dtype is not _SINGLE or not values.is_contiguous():
        # Over strides vector_norm adds up one by one in float32, which is off by 1e-3 for large tensors.
        if numel > _LARGEST_COPY:
            return float(_vector_norm(values, dtype=torch.float64).item())
        values = values.float().contiguous()
    flat = values.view(-1)
    if _SAFE_SMALLEST < largest < _SAFE_LARGEST:
        return _norm_of_single(flat)
    return _norm_out_of_range(flat, largest, numel)


def _norm_of_single(flat: Tensor) -> float:
    """Return the norm of float32 values whose squares are in range."""
    if flat.numel() <= _LARGEST_SUM:
        return _sqrt(_dot(flat, flat).item())
    parts: tuple[Tensor, ...] = torch.split(flat, _LARGEST_SUM)
    return _sqrt(sum(float(_dot(part, part).item()) for part in parts))


def _norm_out_of_range(flat: Tensor, largest: float, numel: int) -> float:
    """Return the norm where squares would overflow or vanish in float32."""
    if numel > _LARGEST_COPY:
        return float(_vector_norm(flat, dtype=torch.float64).item())
    power = max(-_LARGEST_POWER, min(_LARGEST_POWER, -math.frexp(largest)[1]))
    scaled = flat * 2.0**power
    return math.ldexp(_norm_of_single(scaled), -power)
