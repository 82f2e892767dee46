"""What of a tensor there is to read: its plain values, in the order of memory, or why there are none."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGER_TYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
)
_SPARSE_VALUES = {
    torch.sparse_coo: Tensor._values,
    torch.sparse_csr: Tensor.values,
    torch.sparse_csc: Tensor.values,
    torch.sparse_bsr: Tensor.values,
    torch.sparse_bsc: Tensor.values,
}


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
        # Eight-bit floats have no kernels of their own.
        return tensor.float() if tensor.dtype.itemsize == 1 else tensor
    if tensor.dtype in INTEGER_TYPES:
        return tensor.long() if tensor.dtype.is_signed is False and tensor.dtype.itemsize > 1 else tensor
    raise Unmeasurable(f"{str(tensor.dtype).removeprefix('torch.')} tensor")


def in_memory_order(values: Tensor) -> Tensor:
    """Return the same elements as a contiguous tensor if they lie side by side (channels-last, a transpose).

    Kernels that read all of a tensor copy what is not contiguous. A tensor with gaps is returned as it is.
    """
    strides = values.stride()
    by_stride = sorted(range(values.dim()), key=strides.__getitem__, reverse=True)
    ordered = values.permute(by_stride)
    return ordered if ordered.is_contiguous() else values


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
