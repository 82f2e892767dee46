"""The one place where ``nn.Module.__call__`` is replaced, and where it is put back.

Hooks registered on module objects change a run: they cost TransformerEncoderLayer its fast path, make
``torch.save`` and ``torch.jit.script`` fail and follow deep copies. The class attribute does none of that. Any
number of observers can be stacked; the last one to leave restores torch's own function. Where somebody else
has wrapped ours in the meantime, ours stays below theirs: observers let calls pass once they are done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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
_aside: list[Call] = []
"""Torch's own method, once for each that asks for it to be in place."""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Have torch's own method in place for a while, as the compiler is about to look at it; nobody sees a call."""
    with _lock:
        # Below somebody else's wrapper it has to stay.
        was_in_place = bool(_layers) and nn.Module.__call__ is _layers[-1].call
        if was_in_place:
            nn.Module.__call__ = _layers[0].below  # type: ignore[method-assign]
            _aside.append(_layers[0].below)
    try:
        yield
    finally:
        if was_in_place:
            with _lock:
                _aside.pop()
                if not _aside:
                    nn.Module.__call__ = _layers[-1].call  # type: ignore[method-assign]
                    _take_away_those_that_left()


def is_in_place() -> bool:
    """Whether what stands in for torch's own method is what module calls run into first, or nothing does."""
    return bool(_aside) or not _layers or nn.Module.__call__ is _layers[-1].call


def add(observer: Observer) -> None:
    """Let ``observer`` see every module call of this process from now on."""
    with _lock:
        below = _layers[-1].call if _aside else nn.Module.__call__
        layer = _Layer(observer, below, observer.around(below))
        _layers.append(layer)
        if not _aside:
            nn.Module.__call__ = layer.call  # type: ignore[method-assign]


def remove(observer: Observer) -> None:
    """Stop showing calls to ``observer``; nothing happens if it is not there."""
    with _lock:
        for layer in _layers:
            if layer.observer is observer:
                layer.observer = None
        _take_away_those_that_left()


def _take_away_those_that_left() -> None:
    while _layers and _layers[-1].observer is None and nn.Module.__call__ is _layers[-1].call:
        nn.Module.__call__ = _layers.pop().below  # type: ignore[method-assign]
