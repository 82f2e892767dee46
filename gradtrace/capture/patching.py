"""Functions of torch's that are replaced while something is recorded, and put back.

Several tracers may be at work at a time and end in any order; somebody else may wrap what stands here in the
meantime. Only module calls, where every microsecond counts, have a place of their own (``interception``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


class Patch:
    """One function, as attribute of a module or class, and those who wrap it at the moment."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._lock = threading.Lock()
        self._wraps: list[Wrap] = []
        self._standin: Function | None = None
        self._original: Function | None = None
        self._call: Function | None = None

    def add(self, wrap: Wrap) -> None:
        """Let ``wrap``, which gets a function and returns one, stand around the function from now on."""
        with self._lock:
            self._wraps.append(wrap)
            if self._standin is None:
                self._stand_in()
            self._rebuild()

    def remove(self, wrap: Wrap) -> None:
        """Take ``wrap`` away; nothing happens if it is not there."""
        with self._lock:
            self._wraps = [w for w in self._wraps if w != wrap]
            if self._standin is None:
                return
            self._rebuild()
            # Wrapped by somebody else, it has to stay: then it passes calls on.
            if not self._wraps and getattr(self._owner, self._name) is self._standin:
                setattr(self._owner, self._name, self._original)
                self._standin = self._original = self._call = None

    def _stand_in(self) -> None:
        original: Function = getattr(self._owner, self._name)

        @functools.wraps(original)
        def standin(*args: Any, **kwargs: Any) -> Any:
            return (self._call or original)(*args, **kwargs)

        self._original, self._standin = original, standin
        setattr(self._owner, self._name, standin)

    def _rebuild(self) -> None:
        call = self._original
        assert call is not None
        for wrap in self._wraps:
            call = wrap(call)
        self._call = call
