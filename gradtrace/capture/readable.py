"""What of a tensor there is to read: its plain values, in the order of memory, or why there are none."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGER_TYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
)
_WITH_KERNELS = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.float64}
"""Types that hold the integers of those that have no kernels. A double rounds the largest, as the file does."""
_SPARSE_VALUES = {
    torch.sparse_coo: Tensor._values,
    torch.sparse_csr: Tensor.values,
    torch.sparse_csc: Tensor.values,
    torch.sparse_bsr: Tensor.values,
    torch.sparse_bsc: Tensor.values,
}


def is_floating(dtype: torch.dtype) -> bool:
    """Whether values of the type can be NaN or infinite."""
    return dtype.is_floating_point or dtype.is_complex


def is_number(dtype: torch.dtype) -> bool:
    """Whether values of the type are numbers of any kind."""
    return dtype.is_floating_point or dtype.is_complex or dtype in INTEGER_TYPES


class Unmeasurable(Exception):
    """A tensor whose values cannot be looked at; the message is the reason, in a few words."""


def values_of(tensor: Tensor) -> Tensor:
    """Return the floating or integer tensor to look at.

    Raises:
        Unmeasurable: there is none.
    """
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.jagged:
            return values_of(tensor.values())
        if tensor.layout not in _SPARSE_VALUES:
            raise Unmeasurable(f"{tensor.layout} layout")
        return values_of(_SPARSE_VALUES[tensor.layout](tensor))
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        tensor = _plain(tensor)
    if tensor.device.type == "meta":
        raise Unmeasurable("meta tensor")
    if tensor.is_nested:
        raise Unmeasurable("nested tensor")
    if tensor.is_complex():
        return _magnitudes(tensor)
    if tensor.is_floating_point():
        return tensor if tensor.dtype.itemsize > 1 else _widened(tensor)
    if tensor.dtype in INTEGER_TYPES:
        return tensor.to(_WITH_KERNELS[tensor.dtype]) if tensor.dtype in _WITH_KERNELS else tensor
    raise _no_numbers(tensor)


def in_memory_order(values: Tensor) -> Tensor:
    """Return the same elements as a contiguous tensor if they lie side by side (channels-last, a transpose).

    Kernels that read all of a tensor copy what is not contiguous. A tensor with gaps is returned as it is.
    """
    strides = values.stride()
    by_stride = sorted(range(values.dim()), key=strides.__getitem__, reverse=True)
    ordered = values.permute(by_stride)
    return ordered if ordered.is_contiguous() else values


def once(values: Tensor) -> tuple[Tensor, int]:
    """Return the elements without the copies that ``expand`` pretends there are, and how many of each there are."""
    copies = 1
    for dim, (stride, size) in enumerate(zip(values.stride(), values.shape, strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
            copies *= size
    return values, copies


def _magnitudes(tensor: Tensor) -> Tensor:
    # In its own precision the magnitude of a finite element may be infinite.
    if tensor.dtype is not torch.complex128 and tensor.device.type != "mps":
        return tensor.to(torch.complex128).abs()
    magnitudes = tensor.abs()
    is_finite = torch.isfinite(tensor.real) & torch.isfinite(tensor.imag)
    return torch.where(is_finite, magnitudes.clamp(max=torch.finfo(magnitudes.dtype).max), magnitudes)


def _widened(tensor: Tensor) -> Tensor:
    """Return eight-bit floats, which have no kernels of their own, as float32."""
    if not str(tensor.dtype).startswith("torch.float8"):
        raise _no_numbers(tensor)  # several numbers in a byte
    return tensor.float()


def _no_numbers(tensor: Tensor) -> Unmeasurable:
    return Unmeasurable(f"{str(tensor.dtype).removeprefix('torch.')} tensor")


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
