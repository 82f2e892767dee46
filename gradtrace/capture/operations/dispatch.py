"""How torch's dispatch modes are used here: run an operation as if no mode were there, and a place below the user's.

Knows nothing of what is watched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_CASTS_INSIDE = "aten::_trilinear"
"""The one kernel (of nn.Bilinear) that relies on autocast for the operations that it consists of."""
_AUTOCAST_KEYS = {
    device: getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    for device in ("cpu", "cuda", "mps", "xpu")
    if hasattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
}


def redispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation from inside of a mode with the bits that it gives without one.

    Torch switches autocast off for what runs inside of a mode.
    """
    if getattr(func, "_schema", None) is not None and func._schema.name == _CASTS_INSIDE:
        device = args[0].device.type
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            is_on = device in _AUTOCAST_KEYS and torch.is_autocast_enabled(device)
        if is_on:
            with torch._C._SetExcludeDispatchKeyGuard(_AUTOCAST_KEYS[device], False):
                return func(*args, **kwargs)
    return func(*args, **kwargs)


def has_own_dispatch(types: Iterable[type]) -> bool:
    """Whether an operand is of a class that runs operations in its own way (DTensor, fake tensors)."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(getattr(kind, "__torch_dispatch__", plain) is not plain for kind in types)


def put_below(mode: TorchDispatchMode) -> None:
    """Put a mode below all of the user's, so that entering and leaving theirs goes on as before."""
    above = _lifted(None)
    _push_mode(mode)
    _put_back(above)


def take_out(mode: TorchDispatchMode) -> None:
    """Take exactly this mode away, wherever it is; nothing happens if it is not there."""
    _put_back(_lifted(mode))


def _lifted(until: TorchDispatchMode | None) -> list[TorchDispatchMode]:
    """Take the user's modes off down to ``until``, which is taken off too and not returned; top first."""
    lifted: list[TorchDispatchMode] = []
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if getattr(mode, "_mode_key", None) is not None:  # torch's own (fake tensors, tracing) lie below
            break
        _pop_mode()
        if mode is until:
            break
        lifted.append(mode)
    return lifted


def _put_back(lifted: list[TorchDispatchMode]) -> None:
    for mode in reversed(lifted):
        _push_mode(mode)
