"""A bar on stderr for what takes over a second; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DELAY = 1.0
_WIDTH = 30
_ERASE = "\r\x1b[K"


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that is told the share that is done, from 0 to 1; the bar is gone in the end."""
    bar = _Bar(what)
    try:
        yield bar.show
    finally:
        bar.erase()


class _Bar:
    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._shown = False

    def show(self, share: float) -> None:
        if time.monotonic() - self._start < _DELAY or not sys.stderr.isatty():
            return
        full = round(_WIDTH * share)
        sys.stderr.write(f"{_ERASE}{self._what} [{'#' * full}{' ' * (_WIDTH - full)}] {share:4.0%}")
        sys.stderr.flush()
        self._shown = True

    def erase(self) -> None:
        if self._shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
