"""The one place where ``nn.Module.__call__`` is replaced, and where it is put back.

Hooks registered on module objects change a run: they cost TransformerEncoderLayer its fast path, make
``torch.save`` and ``torch.jit.script`` fail and follow deep copies. The class attribute does none of that. Any
number of observers can be stacked; the last one to leave restores torch's own function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

Call = Callable[..., Any]


class Observer(Protocol):
    """Wraps the call of every module."""

    def around(self, call: Call) -> Call:
        """Return a function of (module, *args, **kwargs) that runs ``call`` and watches it."""


_lock = threading.Lock()
_observers: list[Observer] = []
_original: Call | None = None


def add(observer: Observer) -> None:
    """Let ``observer`` see every module call of this process from now on."""
    with _lock:
        _rebuild([*_observers, observer])


def remove(observer: Observer) -> None:
    """Stop showing calls to ``observer``; nothing happens if it is not there."""
    with _lock:
        _rebuild([o for o in _observers if o is not observer])


def _rebuild(observers: list[Observer]) -> None:
    global _original
    if _original is None:
        _original = nn.Module.__call__
    _observers[:] = observers
    call = _original
    for observer in observers:
        call = observer.around(call)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    if not observers:
        _original = None
