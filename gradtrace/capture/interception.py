"""The one place where ``nn.Module.__call__`` is replaced, and where it is put back.

Hooks registered on module objects change a run: they cost TransformerEncoderLayer its fast path, make
``torch.save`` and ``torch.jit.script`` fail and follow deep copies. The class attribute does none of that. Any
number of observers can be stacked; the last one to leave restores torch's own function. Where somebody else
has wrapped ours in the meantime, ours stays below theirs: observers let calls pass once they are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

Call = Callable[..., Any]


class Observer(Protocol):
    """Wraps the call of every module."""

    def around(self, call: Call) -> Call:
        """Return a function of (module, *args, **kwargs) that runs ``call`` and watches it."""


@dataclass
class _Layer:
    """What stands in for ``below``; ``observer`` is None once it has left."""

    observer: Observer | None
    below: Call
    call: Call


_lock = threading.Lock()
_layers: list[_Layer] = []


def add(observer: Observer) -> None:
    """Let ``observer`` see every module call of this process from now on."""
    with _lock:
        below = nn.Module.__call__
        layer = _Layer(observer, below, observer.around(below))
        _layers.append(layer)
        nn.Module.__call__ = layer.call  # type: ignore[method-assign]


def remove(observer: Observer) -> None:
    """Stop showing calls to ``observer``; nothing happens if it is not there."""
    with _lock:
        for layer in _layers:
            if layer.observer is observer:
                layer.observer = None
        while _layers and _layers[-1].observer is None and nn.Module.__call__ is _layers[-1].call:
            nn.Module.__call__ = _layers.pop().below  # type: ignore[method-assign]
