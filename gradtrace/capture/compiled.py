"""torch.compile: calls inside of compiled regions cannot be seen, so they run eagerly while recording."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

NOTE = (
    "torch.compile ran eagerly while recording, since calls inside compiled regions cannot be seen; "
    "compiled code draws other random numbers (dropout)"
)


class EagerWhileRecording:
    """Sets torch's stance ``force_eager`` from the moment that something is compiled until ``remove``.

    The stance is not set before, because asking for it loads the compiler, which takes a second.
    """

    def __init__(self) -> None:
        self.used = False
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        """Watch for ``torch.compile``; a compiler that is loaded already is told at once."""
        original = self._original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._force()
            return original(*args, **kwargs)

        torch.compile = self._replacement = compile  # type: ignore[assignment]
        if "torch._dynamo.eval_frame" in sys.modules:
            self._force()
            self.used = False

    def remove(self) -> None:
        """Put back torch's own function and stance."""
        if torch.compile is self._replacement and self._original is not None:
            torch.compile = self._original  # type: ignore[assignment]
        if "torch._dynamo.eval_frame" in sys.modules:
            torch.compiler.set_stance("default")

    def _force(self) -> None:
        self.used = True
        torch.compiler.set_stance("force_eager")
