"""Backward passes under anomaly detection: what it stopped at, taken from its error and its warning.

For a script that runs under it. A replay looks at the nodes themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradtrace.capture.operations.frames import NOT_THE_USERS
from gradtrace.capture.patching import Patch
from gradtrace.capture.recheck.parts import Anomaly

_engine = Patch(torch.autograd, "_engine_run_backward")
_STOPPED = re.compile(r"Function '(?P<op>\w+)' returned nan values in its \d+th output")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


class AnomalyWatch:
    """Stands around backward passes while it is installed; ``on_stop`` gets what anomaly detection stopped at."""

    def __init__(self, on_stop: Callable[[Anomaly], object]) -> None:
        self.reached = False
        """Whether a gradient has come to what the owner of this object waits for; set by the owner."""
        self.done = False
        """Whether a pass with such a gradient has come to its end."""
        self._on_stop = on_stop
        self._thread = threading.local()

    def install(self) -> None:
        """Switch anomaly detection on and watch it."""
        _engine.add(self._around)
        torch.autograd.set_detect_anomaly(True)

    def remove(self) -> None:
        """Switch anomaly detection off."""
        torch.autograd.set_detect_anomaly(False)
        _engine.remove(self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "inside", False):
                return original(*args, **kwargs)
            thread.inside = True
            try:
                result = self._run(original, args, kwargs)
            finally:
                thread.inside = False
            self.done = self.done or self.reached
            return result

        return _engine_run_backward

    def _run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = _graph_kept(args)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                result = original(*args, **kwargs)
            except RuntimeError as error:
                stopped = _STOPPED.search(str(error))
                if stopped is not None:
                    torch.autograd.set_detect_anomaly(False)
                    with contextlib.suppress(Exception):  # once more, for the boundaries that it did not come to
                        original(*args, **kwargs)
                    self._on_stop(Anomaly(stopped["op"], stopped[0], _line(stopped["op"], said)))
                raise
        for message in said:
            warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
        return result


def _graph_kept(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the engine's arguments (outputs, gradients, retain_graph, ...) with the graph retained."""
    outputs, gradients, _, *others = args
    return outputs, gradients, True, *others


def _line(op: str, said: Iterable[warnings.WarningMessage]) -> str | None:
    """Return the user's innermost line of the traceback that anomaly detection warns with."""
    for warning in said:
        text = str(warning.message)
        if text.startswith(f"Error detected in {op}."):
            frames = [frame for frame in _FRAME.finditer(text) if not frame["file"].startswith(NOT_THE_USERS)]
            if frames:
                return f"{_short(frames[-1]['file'])}:{frames[-1]['line']} in {frames[-1]['function']}"
    return None


def _short(file: str) -> str:
    """Return a path as seen from the script's directory."""
    base = os.path.join(sys.path[0], "") if sys.path else ""
    return file[len(base) :] if base and file.startswith(base) else file
