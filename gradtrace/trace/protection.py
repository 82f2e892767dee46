"""Which steps are never thinned: those around an incident, as far as their share of the disk allows."""

from __future__ import annotations

import threading

AROUND = 10
"""So many steps before and after a protected one are protected too."""


class Protection:
    """Steps that are to stay as they are. Safe to use from several threads, and from a signal handler."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._windows: list[tuple[int, int]] = []

    def add(self, step: int) -> None:
        """Protect ``step`` and those around it."""
        first, last = step - AROUND, step + AROUND
        with self._lock:
            newest = self._windows[-1] if self._windows else None
            if newest is None or first > newest[1] + 1:
                self._windows.append((first, last))
            elif first >= newest[0]:
                self._windows[-1] = (newest[0], max(newest[1], last))
            else:
                self._insert(first, last)

    def _insert(self, first: int, last: int) -> None:
        """Add a window that begins before the newest one does."""
        joined: list[tuple[int, int]] = []
        for window in sorted([*self._windows, (first, last)]):
            if joined and window[0] <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], window[1]))
            else:
                joined.append(window)
        self._windows = joined

    def ranges(self, most: int) -> list[range]:
        """Return the protected steps, ``most`` of them at most: around the first incident, then the latest ones."""
        with self._lock:
            windows = [range(first, last + 1) for first, last in self._windows]
        chosen = []
        for window in [*windows[:1], *reversed(windows[1:])]:
            chosen.append(window[:most])
            most -= len(chosen[-1])
            if most <= 0:
                break
        return chosen
