"""Tensor -> counts of NaN, +Inf and -Inf, and min, max and L2 norm of the finite elements.

On the CPU the numbers are there at once (``on_host.py``). On an accelerator nothing waits: the same numbers are
computed by the device, stay there, and ``resolve`` brings all of them over in one copy (``on_device.py``). Only
these modules look at the values of tensors.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradtrace.capture import on_device, on_host
from gradtrace.capture.fused import FusedBuffer, Row, fetch
from gradtrace.capture.measures import Kind, Measure
from gradtrace.capture.readable import INTEGER_TYPES, Unmeasurable, values_of
from gradtrace.trace.sent import let_pass

__all__ = ["Measure", "Statistics", "Unmeasurable"]

_MOST_KINDS = 10_000
"""A training whose shapes change all the time would fill the memory with kinds."""
_QUICK_TYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_reference = weakref.ref

_Pending = tuple[Row | Tensor, Callable[[list[float]], None]]
"""Numbers that are still on a device, as a vector, and who is to be told of them."""


class Statistics:
    """Measures tensors, each only once while it lives and is not changed."""

    def __init__(self, *, on_device: bool | None = None, fused: FusedBuffer | None = None) -> None:
        """``on_device`` forces the accelerator's way (True) or the CPU's way (False) for every tensor.

        ``fused`` launches the kernel that takes an accelerator's numbers where it can; by default one of its own.
        """
        self._on_device = on_device
        self._fused = FusedBuffer() if fused is None else fused
        self._lock = threading.RLock()
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Measure]] = {}
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._pending: list[_Pending] = []
        self.saw_nonfinite = False
        """Whether something non-finite has been measured since this was last set to False."""

    def anew(self) -> Statistics:
        """Return one that measures in the same way and has seen nothing yet."""
        return Statistics(on_device=self._on_device, fused=self._fused)

    def measure_once(self, tensor: Tensor) -> Measure:
        """Return the measure of ``tensor``, taken anew only if it has not been seen in its present version.

        Raises:
            Unmeasurable: see ``measure``.
        """
        try:
            version = tensor._version
        except RuntimeError as error:  # an inference tensor has none
            let_pass(error)
            return self.measure(tensor)
        key = id(tensor)
        known = self._seen.get(key)
        if known is not None and known[1] == version and known[0]() is tensor:
            return known[2]
        measure = self.measure(tensor)
        if not isinstance(tensor, torch.nn.Parameter):  # a weak reference would be in the way of swap_tensors
            self._seen[key] = (_reference(tensor), version, measure)
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
        try:
            kind = self._kinds.get((type(tensor), tensor.layout, tensor.dtype, tensor.shape, tensor.device))
        except RuntimeError as error:  # a nested tensor has no shape
            let_pass(error)
            kind = None
        if kind is None or not kind.is_quick:
            return self._measure_values(tensor, values_of(tensor))
        measure = on_host.read(kind, tensor)
        if measure.counts is not None:
            self.saw_nonfinite = True
        return measure

    def _measure_values(self, tensor: Tensor, values: Tensor) -> Measure:
        kind = self._kind_of(tensor, values)
        if kind.numel == 0:
            return Measure(kind)
        is_integer = tensor.dtype in INTEGER_TYPES
        if self.waits(values):
            measure = Measure(kind)
            measure.pending = True
            numbers: Row | Tensor
            if is_integer:
                numbers = on_device.extremes_of(values)
            else:
                numbers = self._fused.row_for(values) or on_device.numbers_of(values)
            self._pending.append((numbers, functools.partial(self._fill, measure)))
            return measure
        if is_integer:
            low, high = torch.aminmax(values)
            return Measure(kind, float(low.item()), float(high.item()))
        measure = on_host.read(kind, values)
        self.saw_nonfinite = self.saw_nonfinite or not measure.finite
        return measure

    def _kind_of(self, tensor: Tensor, values: Tensor) -> Kind:
        """Return the kind of a tensor of which ``values`` are measured: the same for all that are alike."""
        key = (type(tensor), tensor.layout, tensor.dtype, tensor.shape, tensor.device)
        numel = values.numel()
        known = self._kinds.get(key)
        if known is not None and known.numel == numel:
            return known
        is_plain = values is tensor and type(tensor) in _PLAIN_CLASSES and numel > 0
        is_quick = is_plain and tensor.dtype in _QUICK_TYPES and not self.waits(tensor)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        remark = None
        if hasattr(tensor, "to_local") and numel != tensor.numel():
            remark = f"local shard {list(values.shape)}"
        kind = Kind(tensor.dtype, tensor.shape, tensor.device, numel, is_quick=is_quick, remark=remark)
        self._kinds[key] = kind
        return kind

    def waits(self, tensor: Tensor) -> bool:
        """Whether the numbers of ``tensor`` stay on its device until ``resolve``."""
        return tensor.device.type != "cpu" if self._on_device is None else self._on_device

    def all_finite(self, tensor: Tensor) -> bool:
        """Whether no element is NaN or infinite; one fast pass, and a wait if the device is not the CPU.

        Raises:
            Unmeasurable: see ``measure``.
        """
        values = values_of(tensor)
        if values.numel() == 0 or tensor.dtype in INTEGER_TYPES:
            return True
        is_flat = values.dtype is torch.float32 and values.dim() == 1
        if math.isfinite((torch.dot(values, values) if is_flat else values.sum()).item()):
            return True
        low, high = torch.aminmax(values)  # a sum may overflow, of squares even more so
        return math.isfinite(low.item()) and math.isfinite(high.item())

    def total(self, tensor: Tensor) -> Tensor:
        """Return the plain sum of the elements, of the magnitudes of complex ones, on their device.

        The cheapest look there is: a finite sum says that all elements are finite, and another sum that it is
        another tensor.

        Raises:
            Unmeasurable: see ``measure``.
        """
        return (tensor if _is_plain(tensor) else values_of(tensor)).sum()

    def totals(self, tensors: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        """Call ``then`` with the sums of ``tensors``, as ``norms`` does with their norms.

        Raises:
            Unmeasurable: see ``measure``.
        """
        self._tell([self.total(tensor) for tensor in tensors], then)

    def norms(self, tensors: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        """Call ``then`` with the L2 norms of ``tensors``, in their own precision: at once, or at ``resolve``.

        A finite norm says that all elements are finite; another may have overflowed. The tensors are on one device.

        Raises:
            Unmeasurable: see ``measure``.
        """
        self._tell(torch._foreach_norm([t if _is_plain(t) else values_of(t) for t in tensors]), then)

    def _tell(self, scalars: Sequence[Tensor], then: Callable[[list[float]], None]) -> None:
        numbers = torch.stack(tuple(scalars))
        numbers = numbers.to(on_device.number_type(numbers))
        if self.waits(numbers):
            self._pending.append((numbers, then))
        else:
            then(numbers.tolist())

    def surely_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one look is enough to see that all elements of all tensors are finite. False says nothing."""
        if self._on_device or not tensors:
            return not tensors
        dtype = tensors[0].dtype
        for tensor in tensors:
            if not (_is_plain(tensor) and tensor.is_cpu and tensor.dtype is dtype):
                return False
        return math.isfinite(torch.stack([tensor.sum() for tensor in tensors]).sum().item())

    @property
    def waiting(self) -> int:
        """How many measures wait for ``resolve``."""
        return len(self._pending)

    def resolve(self) -> None:
        """Fill in all measures that were taken on an accelerator: one copy to the host a device."""
        while self._pending:  # one that turns out to be non-finite is measured exactly, which may wait again
            self._resolve()

    def _resolve(self) -> None:
        by_device: dict[torch.device, list[_Pending]] = defaultdict(list)
        for pending in self._taken():
            by_device[pending[0].device].append(pending)
        self._fused.turn()
        for group in by_device.values():
            found = fetch([numbers for numbers, _ in group])
            for (_, then), values in zip(group, found, strict=True):
                then(values)

    def _fill(self, measure: Measure, numbers: list[float]) -> None:
        on_device.fill_from_row(measure, numbers)
        self.saw_nonfinite = self.saw_nonfinite or not measure.finite

    def _taken(self) -> list[_Pending]:
        """Take what waits; other threads may go on adding, and may resolve too."""
        with self._lock:
            count = len(self._pending)
            taken = self._pending[:count]
            del self._pending[:count]
        return taken

    def forget(self) -> None:
        """Drop what was remembered of tensors, so that memory does not grow from step to step."""
        self._seen.clear()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's own values are to be looked at, as those of nearly all are."""
    is_dense = type(tensor) in _PLAIN_CLASSES and tensor.layout is _STRIDED and not tensor.is_nested
    return is_dense and tensor.dtype in _QUICK_TYPES and tensor.device.type != "meta"
