"""Tensor subclasses of the script's own, whose ``__torch_function__`` may count, print or raise.

A look at an attribute is enough to have it called. So once a tensor of such a class has been met, gradtrace's own code
runs with that switched off; until then nothing is, since it costs at every call and hook.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

without_their_own_ways = torch._C.DisableTorchFunctionSubclass
"""Context in which tensors of all classes are treated alike."""

with_their_own_ways = torch._C._EnableTorchFunction
"""Context in which the script's own code can run inside of that."""
_none = torch._C._disabled_torch_function_impl
_PLAIN = (Tensor, nn.Parameter)


class _Met:
    """``any`` says whether a tensor of such a class has been met in this process."""

    __slots__ = ("any",)

    def __init__(self) -> None:
        self.any = False


met = _Met()


def note(kind: type) -> None:
    """Take notice of the class of a tensor that is not ``Tensor`` itself. Those of torch are well-behaved."""
    own_way = getattr(kind, "__torch_function__", _none)
    if kind not in _PLAIN and own_way is not _none and not kind.__module__.startswith("torch."):
        met.any = True
