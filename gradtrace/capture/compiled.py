"""torch.compile: calls inside of compiled regions cannot be seen, so they run eagerly while recording."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from gradtrace.capture.patching import Patch

NOTE = (
    "torch.compile ran eagerly while recording, since calls inside compiled regions cannot be seen; "
    "compiled code draws other random numbers (dropout)"
)

_compile = Patch(torch, "compile")


class _Stance:
    """torch's stance ``force_eager``, one for all recordings of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[object] = []
        self._context: Any = None

    def take(self, user: object) -> None:
        """Have everything run eagerly until ``user``, and all others, have left."""
        with self._lock:
            if user in self._users:
                return
            if not self._users:
                self._context = torch.compiler.set_stance("force_eager")
            self._users.append(user)

    def leave(self, user: object) -> None:
        """Put the stance of before back when the last one leaves."""
        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if not self._users:
                self._context.__exit__(None, None, None)
                self._context = None


_stance = _Stance()


class EagerWhileRecording:
    """Keeps torch's stance ``force_eager`` from the moment that something is compiled until ``remove``.

    The stance is not set before, because asking for it loads the compiler, which takes a second.
    """

    def __init__(self) -> None:
        self.used = False

    def install(self) -> None:
        """Watch for ``torch.compile``; a compiler that is loaded already is told at once."""
        _compile.add(self._around)
        if "torch._dynamo.eval_frame" in sys.modules:
            _stance.take(self)

    def remove(self) -> None:
        """Put back torch's own function and stance."""
        _compile.remove(self._around)
        _stance.leave(self)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self.used = True
            with contextlib.suppress(RuntimeError):  # in the middle of compiling there is nothing to be done
                _stance.take(self)
            return original(*args, **kwargs)

        return compile
