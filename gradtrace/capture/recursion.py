"""Room on the stack for what stands around each module call, so that a deep model runs as deep as without.

Each call of a module has one frame more while it is watched. A script that comes near Python's limit by itself (modules
nested hundreds deep, a network that calls itself along a tree) would exceed it only when it is recorded.
"""

from __future__ import annotations

import contextlib
import sys
import threading

_OWN = 200
"""Frames of gradtrace's own beyond the script's innermost."""
_MOST = 1_000
"""A limit that the script has raised as far as its stack goes is not to be raised by as much as a half again."""

_lock = threading.Lock()
_rooms: list[StackRoom] = []
_before = _raised = 0


class StackRoom:
    """The room that one recording needs; the first one raises the limit, and the last one puts it back."""

    def install(self) -> None:
        """Have the limit of recursion raised by a half, or by a thousand where that is less."""
        global _before, _raised
        with _lock:
            if not _rooms:
                _before = sys.getrecursionlimit()
                _raised = _before + min(_before // 2, _MOST) + _OWN
                sys.setrecursionlimit(_raised)
            _rooms.append(self)

    def remove(self) -> None:
        """Need no room any more; a limit that the script has set meanwhile stays."""
        with _lock:
            if self not in _rooms:
                return
            _rooms.remove(self)
            if not _rooms and sys.getrecursionlimit() == _raised:
                with contextlib.suppress(RecursionError):  # the script is deeper than that at the moment
                    sys.setrecursionlimit(_before)
