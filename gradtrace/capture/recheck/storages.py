"""How much memory tensors take on disk, and tensors that take no more than they show.

A saved tensor takes its whole storage along: one row of a large table would bring the table. Pure, knows nothing
of capsules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.recheck.plain import tensors_in_plain

_Key = tuple[Any, ...]


def stored_bytes(plain: Any) -> int:
    """Return how many bytes the tensors of plain data take once compact; what is shared counts once."""
    sizes = {_key(tensor): _bytes(tensor) for _, tensor in tensors_in_plain(plain)}
    return sum(sizes.values())


def compact(plain: Any) -> Any:
    """Return plain data with its tensors on the CPU and views of larger storages replaced by copies.

    Tensors that are the same elements stay so. Strides of expanded tensors and ``requires_grad`` are kept.
    """
    return _compact(plain, {})


def _compact(value: Any, done: dict[_Key, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = _key(value)
        if key not in done:
            done[key] = _alone(value)
        return _as(value, done[key])
    if isinstance(value, dict):
        return {key: _compact(item, done) for key, item in value.items()}
    if isinstance(value, list):
        return [_compact(item, done) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_compact(item, done) for item in value)
    return value


def _as(tensor: Tensor, saved: Tensor) -> Tensor:
    """Return an alias of ``saved`` with shape, strides and requires_grad of ``tensor``."""
    if not _is_view(tensor):
        saved = saved.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return saved.detach().requires_grad_(tensor.requires_grad)


def _alone(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        if _is_view(tensor):
            once = tensor.detach()[_once(tensor)]
            return once.clone().cpu().expand(tensor.shape)
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(tensor.untyped_storage())
        return whole.cpu()


def _once(tensor: Tensor) -> tuple[slice, ...]:
    """Return the index that shows every expanded element once."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


def _is_view(tensor: Tensor) -> bool:
    """Whether the tensor shows less than its storage holds."""
    return _shown(tensor) < tensor.untyped_storage().nbytes()


def _shown(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


def _key(tensor: Tensor) -> _Key:
    storage = tensor.untyped_storage()
    if not _is_view(tensor):
        return tensor.device, storage.data_ptr(), storage.nbytes(), tensor.dtype
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.size()),
        tensor.stride(),
    )


def _bytes(tensor: Tensor) -> int:
    return _shown(tensor) if _is_view(tensor) else tensor.untyped_storage().nbytes()
