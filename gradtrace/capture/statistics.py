"""Tensor -> counts of NaN, +Inf and -Inf, and min, max and L2 norm of the finite elements.

On the CPU a look at a value costs nothing, so two fast passes (``aminmax`` and a norm) give the verdict of a
finite tensor and the exact counts run only when those say that something is wrong. On an accelerator nothing
waits: the same numbers are computed by the device, stay there, and ``resolve`` brings all of them over in one
copy. Only this module looks at the values of tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_INTEGER_TYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
)
_SAFE_LARGEST = 1e14
"""Largest magnitude whose squares, summed over 1e10 elements, stay below float32's limit of 3.4e38."""
_SAFE_SMALLEST = 1e-12
"""Smallest largest-magnitude whose squares float32 still holds with its full precision."""
_DOT_FROM = 32_768
"""Number of elements from which ``dot`` beats ``vector_norm`` on the CPU, in time and in precision."""
_SCALAR = torch.Size([])
_HOST = torch.device("cpu")
_LARGEST_COPY = 4_000_000
"""Number of elements up to which a tensor with gaps is copied rather than added up in float64, which is slower."""
_SPARSE_VALUES = {
    torch.sparse_coo: Tensor._values,
    torch.sparse_csr: Tensor.values,
    torch.sparse_csc: Tensor.values,
    torch.sparse_bsr: Tensor.values,
    torch.sparse_bsc: Tensor.values,
}


class Unmeasurable(Exception):
    """A tensor whose values cannot be looked at; the message is the reason, in a few words."""


class Measure:
    """What is known of one tensor: its kind and the statistics of its elements.

    ``nan``, ``posinf`` and ``neginf`` are counts. ``min``, ``max`` and ``norm`` are over the finite elements
    and None when there is none. Of a complex tensor the magnitudes are measured; of an integer tensor only
    ``min`` and ``max``. On an accelerator the numbers are None until ``Statistics.resolve`` has run.
    """

    __slots__ = (
        "device",
        "dtype",
        "max",
        "min",
        "nan",
        "neginf",
        "norm",
        "numel",
        "pending",
        "posinf",
        "shape",
    )

    def __init__(self, dtype: torch.dtype, shape: torch.Size, device: torch.device, numel: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self.numel = numel
        self.nan = self.posinf = self.neginf = 0
        self.min: float | None = None
        self.max: float | None = None
        self.norm: float | None = None
        self.pending = False

    @classmethod
    def of_number(cls, value: float) -> Measure:
        """Return the measure of a Python number, such as a learning rate."""
        measure = cls(torch.float64, _SCALAR, _HOST, 1)
        measure.be(value)
        return measure

    def be(self, value: float) -> None:
        """Become the measure of a number, which may not have been known before."""
        self.pending = False
        if math.isfinite(value):
            self.min = self.max = value
            self.norm = abs(value)
        else:
            self.nan, self.posinf, self.neginf = int(value != value), int(value > 0), int(value < 0)

    @property
    def finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not (self.nan or self.posinf or self.neginf)


class Statistics:
    """Measures tensors, each only once while it lives and is not changed."""

    def __init__(self, *, on_device: bool | None = None) -> None:
        """``on_device`` forces the accelerator's way (True) or the CPU's way (False) for every tensor."""
        self._on_device = on_device
        self._lock = threading.RLock()
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Measure]] = {}
        self._pending: list[tuple[Tensor, Callable[[list[float]], None]]] = []
        self.saw_nonfinite = False
        """Whether something non-finite has been measured since this was last set to False."""

    def anew(self) -> Statistics:
        """Return one that measures in the same way and has seen nothing yet."""
        return Statistics(on_device=self._on_device)

    def measure_once(self, tensor: Tensor) -> Measure:
        """Return the measure of ``tensor``, taken anew only if it has not been seen in its present version.

        Raises:
            Unmeasurable: see ``measure``.
        """
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        measure = self.measure(tensor)
        if not tensor.is_inference():
            self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, measure)
        return measure

    def known(self, tensor: Tensor) -> Measure | None:
        """Return the measure of a tensor that has been seen in its present version, if its numbers are here."""
        seen = self._seen.get(id(tensor))
        if seen is None or seen[0]() is not tensor or seen[1] != tensor._version or seen[2].pending:
            return None
        return seen[2]

    def measure(self, tensor: Tensor) -> Measure:
        """Return the measure of ``tensor``. To be called with grad mode off.

        Raises:
            Unmeasurable: the values cannot be read: meta, fake, quantized or nested tensors, tensors inside
                of a functorch transform, types without order.
        """
        values = _values_of(tensor)
        measure = Measure(tensor.dtype, tensor.shape, tensor.device, values.numel())
        if measure.numel == 0:
            return measure
        is_integer = values.dtype in _INTEGER_TYPES
        if self.waits(values):
            numbers = _device_extremes(values) if is_integer else _device_numbers(values)
            measure.pending = True
            self._pending.append((numbers, functools.partial(self._fill, measure)))
        elif is_integer:
            low, high = torch.aminmax(values)
            measure.min, measure.max = float(low.item()), float(high.item())
        else:
            _fill_float(measure, values)
            self.saw_nonfinite = self.saw_nonfinite or not measure.finite
        return measure

    def waits(self, tensor: Tensor) -> bool:
        """Whether the numbers of ``tensor`` stay on its device until ``resolve``."""
        return tensor.device.type != "cpu" if self._on_device is None else self._on_device

    def all_finite(self, tensor: Tensor) -> bool:
        """Whether no element is NaN or infinite; one fast pass, and a wait if the device is not the CPU.

        Raises:
            Unmeasurable: see ``measure``.
        """
        values = _values_of(tensor)
        if values.numel() == 0 or values.dtype in _INTEGER_TYPES:
            return True
        if math.isfinite(values.sum().item()):
            return True
        low, high = torch.aminmax(values)  # a sum may overflow
        return math.isfinite(low.item()) and math.isfinite(high.item())

    def total(self, tensor: Tensor) -> Tensor:
        """Return the plain sum of the elements, of the magnitudes of complex ones, on their device.

        The cheapest look there is: a finite sum says that all elements are finite, and another sum that it is
        another tensor.

        Raises:
            Unmeasurable: see ``measure``.
        """
        return _values_of(tensor).sum()

    def norms(self, tensors: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        """Call ``then`` with the L2 norms of ``tensors``, in their own precision: at once, or at ``resolve``.

        A finite norm says that all elements are finite; another may have overflowed. The tensors are on one device.

        Raises:
            Unmeasurable: see ``measure``.
        """
        self._tell(torch._foreach_norm([_values_of(tensor) for tensor in tensors]), then)

    def totals(self, tensors: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        """Call ``then`` with the sums of ``tensors``, as ``norms`` does with their norms.

        Raises:
            Unmeasurable: see ``measure``.
        """
        self._tell([self.total(tensor) for tensor in tensors], then)

    def _tell(self, scalars: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        numbers = torch.stack(tuple(scalars))
        numbers = numbers.to(_number_type(numbers))
        if self.waits(numbers):
            self._pending.append((numbers, then))
        else:
            then(numbers.tolist())

    @property
    def waiting(self) -> int:
        """How many measures wait for ``resolve``."""
        return len(self._pending)

    def resolve(self) -> None:
        """Fill in all measures that were taken on an accelerator: one copy to the host a device."""
        while self._pending:  # one that turns out to be non-finite is measured exactly, which may wait again
            self._resolve()

    def _resolve(self) -> None:
        by_device: dict[torch.device, list[tuple[Tensor, Callable[[list[float]], None]]]] = defaultdict(list)
        for pending in self._taken():
            by_device[pending[0].device].append(pending)
        for group in by_device.values():
            values = iter(torch.cat([numbers for numbers, _ in group]).tolist())
            for numbers, then in group:
                then(list(itertools.islice(values, len(numbers))))

    def _fill(self, measure: Measure, numbers: list[float]) -> None:
        _fill_from_row(measure, numbers)
        measure.pending = False
        self.saw_nonfinite = self.saw_nonfinite or not measure.finite

    def _taken(self) -> list[tuple[Tensor, Callable[[list[float]], None]]]:
        """Take what waits; other threads may go on adding, and may resolve too."""
        with self._lock:
            count = len(self._pending)
            taken = self._pending[:count]
            del self._pending[:count]
        return taken

    def forget(self) -> None:
        """Drop what was remembered of tensors, so that memory does not grow from step to step."""
        self._seen.clear()


def _values_of(tensor: Tensor) -> Tensor:
    """Return the floating or integer tensor to look at, or say why there is none."""
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.jagged:
            return _values_of(tensor.values())
        if tensor.layout not in _SPARSE_VALUES:
            raise Unmeasurable(f"{tensor.layout} layout")
        return _values_of(_SPARSE_VALUES[tensor.layout](tensor))
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        tensor = _plain(tensor)
    if tensor.device.type == "meta":
        raise Unmeasurable("meta tensor")
    if tensor.is_nested:
        raise Unmeasurable("nested tensor")
    if tensor.is_complex():
        return _magnitudes(tensor)
    if tensor.is_floating_point():
        # Eight-bit floats have no kernels of their own.
        return tensor.float() if tensor.dtype.itemsize == 1 else tensor
    if tensor.dtype in _INTEGER_TYPES:
        return tensor.long() if tensor.dtype.is_signed is False and tensor.dtype.itemsize > 1 else tensor
    raise Unmeasurable(f"{str(tensor.dtype).removeprefix('torch.')} tensor")


def _magnitudes(tensor: Tensor) -> Tensor:
    # In its own precision the magnitude of a finite element may be infinite.
    own_precision = tensor.dtype is torch.complex128 or tensor.device.type == "mps"
    return tensor.abs() if own_precision else tensor.to(torch.complex128).abs()


def _plain(tensor: Tensor) -> Tensor:
    """Return a subclass's tensor without its behaviour: of a DTensor the local shard, no collective."""
    if hasattr(tensor, "to_local"):
        local: Tensor = tensor.to_local()
        return local
    if hasattr(type(tensor), "__torch_dispatch__") and type(tensor).__torch_dispatch__ is not (
        torch._C._disabled_torch_dispatch_impl
    ):
        raise Unmeasurable(type(tensor).__name__)
    return tensor.as_subclass(Tensor)


def _fill_float(measure: Measure, values: Tensor) -> None:
    low_tensor, high_tensor = torch.aminmax(values)
    low, high = low_tensor.item(), high_tensor.item()
    if math.isfinite(low) and math.isfinite(high):
        measure.min, measure.max = low, high
        measure.norm = _norm(values, max(abs(low), abs(high)))
        return
    measure.nan = int(torch.isnan(values).sum().item())
    measure.posinf = int(torch.isposinf(values).sum().item())
    measure.neginf = int(torch.isneginf(values).sum().item())
    finite = values[torch.isfinite(values)]
    if finite.numel():
        low_tensor, high_tensor = torch.aminmax(finite)
        measure.min, measure.max = low_tensor.item(), high_tensor.item()
        measure.norm = _norm(finite, max(abs(measure.min), abs(measure.max)))


def _norm(values: Tensor, largest: float) -> float:
    """Return the L2 norm of finite values; ``largest`` is their largest magnitude."""
    if largest == 0.0:
        return 0.0
    if values.dtype is torch.float64:
        if 1e-140 < largest < 1e140:
            return float(torch.linalg.vector_norm(values).item())
        return largest * float(torch.linalg.vector_norm(values / largest).item())
    if not _SAFE_SMALLEST < largest < _SAFE_LARGEST:
        return float(torch.linalg.vector_norm(values, dtype=torch.float64).item())
    if values.numel() >= _DOT_FROM:
        # Over strides vector_norm adds up one by one in float32, which is off by 1e-3 for large tensors.
        if not values.is_contiguous() and values.numel() > _LARGEST_COPY:
            return float(torch.linalg.vector_norm(values, dtype=torch.float64).item())
        flat = values.reshape(-1).float()
        return math.sqrt(torch.dot(flat, flat).item())
    return float(torch.linalg.vector_norm(values, dtype=torch.float32).item())


def _device_numbers(values: Tensor) -> Tensor:
    """Return nan, posinf, neginf, min, max and norm as one tensor on the device of ``values``, without a wait.

    A tensor without a finite element has min = +Inf and max = -Inf.
    """
    kind = _number_type(values)
    finite = torch.isfinite(values)
    clean = torch.where(finite, values, 0)
    largest = clean.abs().amax().to(kind)
    scale = torch.where(largest > 0, largest, 1)
    numbers = (
        torch.isnan(values).sum(),
        torch.isposinf(values).sum(),
        torch.isneginf(values).sum(),
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
        torch.linalg.vector_norm(clean.to(kind) / scale) * scale,
    )
    return torch.stack([number.to(kind) for number in numbers])


def _device_extremes(values: Tensor) -> Tensor:
    """Return the same six numbers of integers, of which only min and max mean something."""
    low, high = (number.to(_number_type(values)) for number in torch.aminmax(values))
    zero = torch.zeros_like(low)
    return torch.stack([zero, zero, zero, low, high, torch.full_like(low, math.nan)])


def _number_type(values: Tensor) -> torch.dtype:
    # MPS has no float64.
    return torch.float32 if values.device.type == "mps" else torch.float64


def _fill_from_row(measure: Measure, row: list[float]) -> None:
    measure.nan, measure.posinf, measure.neginf = int(row[0]), int(row[1]), int(row[2])
    if row[3] <= row[4]:
        measure.min, measure.max = row[3], row[4]
        measure.norm = None if math.isnan(row[5]) else row[5]
