"""``Measure``: what is known of one tensor. Its ``Kind`` is shared by all tensors that are alike.

A step makes hundreds of measures, and the next step makes the same again: what they share is made once, so that
the rest is a handful of numbers, and that alike can be told by identity.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

_SCALAR = torch.Size([])
_HOST = torch.device("cpu")
_NO_COUNTS = (0, 0, 0)
_LARGEST = sys.float_info.max


class Kind:
    """Type, shape, device and number of elements of a tensor.

    ``is_quick``: the fast way of measuring takes it; ``is_single``: of those, the fastest, which is for float32.
    ``texts`` are type, shape and device as the file names them; ``remark`` says so where less than the tensor was read.
    """

    __slots__ = ("device", "dtype", "is_flat", "is_quick", "is_single", "numel", "remark", "shape", "texts")

    def __init__(
        self,
        dtype: torch.dtype,
        shape: torch.Size,
        device: torch.device,
        numel: int,
        *,
        is_quick: bool = False,
        remark: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self.numel = numel
        self.is_quick = is_quick
        self.is_single = is_quick and dtype is torch.float32
        self.is_flat = len(shape) == 1
        self.remark = remark
        self.texts = (str(dtype).removeprefix("torch."), str(list(shape)), str(device))


_NUMBER = Kind(torch.float64, _SCALAR, _HOST, 1)


class Measure:
    """What is known of one tensor: its kind and the statistics of its elements.

    ``counts`` are those of NaN, +Inf and -Inf, None where all elements are finite. ``min``, ``max`` and ``norm``
    are over the finite elements and None when there is none. Of a complex tensor the magnitudes are measured; of
    an integer tensor only ``min`` and ``max``. On an accelerator the numbers are None until ``Statistics.resolve``
    has run: they are ``pending``.
    """

    __slots__ = ("counts", "kind", "max", "min", "norm", "pending")

    def __init__(
        self,
        kind: Kind,
        min: float | None = None,
        max: float | None = None,
        norm: float | None = None,
        counts: tuple[int, int, int] | None = None,
    ) -> None:
        self.kind = kind
        self.min = min
        self.max = max
        self.norm = norm
        self.counts = counts
        self.pending = False

    @classmethod
    def of_number(cls, value: float) -> Measure:
        """Return the measure of a Python number, such as a learning rate."""
        measure = cls(_NUMBER)
        measure.be(value)
        return measure

    def be(self, value: float) -> None:
        """Become the measure of a number, which may not have been known before."""
        self.pending = False
        if math.isfinite(value):
            self.min = self.max = value
            self.norm = abs(value)
        else:
            self.min = self.max = self.norm = None
            self.counts = int(value != value), int(value > 0), int(value < 0)

    @property
    def finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return self.counts is None

    @property
    def nan(self) -> int:
        """How many elements are NaN."""
        return (self.counts or _NO_COUNTS)[0]

    @property
    def posinf(self) -> int:
        """How many elements are +Inf."""
        return (self.counts or _NO_COUNTS)[1]

    @property
    def neginf(self) -> int:
        """How many elements are -Inf."""
        return (self.counts or _NO_COUNTS)[2]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.kind.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.kind.shape

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self.kind.device

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.kind.numel


def within_doubles(norm: float) -> float:
    """Return the norm of finite elements, which are doubles: one that is larger than all doubles is the largest."""
    return min(norm, _LARGEST)


class _Nothing:
    """The measure of what has none, an event: every column of it is NULL."""

    counts = kind = max = min = norm = None
    pending = False


NOTHING: Any = _Nothing()
