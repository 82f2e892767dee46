"""The numbers of a tensor on an accelerator: computed there, left there, and read later, all in one copy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradtrace.capture.measures import Measure, within_doubles
from gradtrace.capture.readable import once


def numbers_of(values: Tensor) -> Tensor:
    """Return nan, posinf, neginf, min, max and norm as one tensor on the device of ``values``, without a wait.

    A tensor without a finite element has min = +Inf and max = -Inf.
    """
    kind = number_type(values)
    values, copies = once(values)
    finite = torch.isfinite(values)
    clean = torch.where(finite, values, 0)
    largest = clean.abs().amax().to(kind)
    scale = torch.where(largest > 0, largest, 1)
    numbers = (
        torch.isnan(values).sum() * copies,
        torch.isposinf(values).sum() * copies,
        torch.isneginf(values).sum() * copies,
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
        torch.linalg.vector_norm(clean.to(kind) / scale) * scale * math.sqrt(copies),
    )
    return torch.stack([number.to(kind) for number in numbers])


def extremes_of(values: Tensor) -> Tensor:
    """Return the same six numbers of integers, of which only min and max mean something."""
    low, high = (number.to(number_type(values)) for number in torch.aminmax(values))
    zero = torch.zeros_like(low)
    return torch.stack([zero, zero, zero, low, high, torch.full_like(low, math.nan)])


def fill_from_row(measure: Measure, row: list[float]) -> None:
    """Fill in the six numbers, which have come to the host."""
    nan, posinf, neginf = int(row[0]), int(row[1]), int(row[2])
    measure.counts = (nan, posinf, neginf) if nan or posinf or neginf else None
    if row[3] <= row[4]:
        measure.min, measure.max = row[3], row[4]
        measure.norm = None if math.isnan(row[5]) else within_doubles(row[5])
    measure.pending = False


def number_type(values: Tensor) -> torch.dtype:
    """Return the type in which numbers of ``values`` are brought over."""
    # MPS has no float64.
    return torch.float32 if values.device.type == "mps" else torch.float64
