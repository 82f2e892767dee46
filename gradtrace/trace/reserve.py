"""A little room that a recording holds back, so that its end can still be noted where nothing else can be written."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

RESERVE_FILE = "reserve.tmp"
_MORE = 8192
_GAVE_OUT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


class Reserve:
    """Bytes on the disk, and a file descriptor. Nothing of it is ever read."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE_FILE
        self._size = 0
        self._fd: int | None = None

    def hold(self, size: int) -> None:
        """Hold back room for a file of ``size`` bytes.

        Raises:
            OSError: there is no room.
        """
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        while self._size < size + _MORE:
            self._size += os.pwrite(self._fd, bytes(size + _MORE - self._size), self._size)

    def helps(self, error: OSError) -> bool:
        """Give the room back, once, if the lack of it is the reason for ``error``; return whether that was so."""
        if self._fd is None or error.errno not in _GAVE_OUT:
            return False
        self.give_back()
        return True

    def give_back(self) -> None:
        """Hold back nothing any more."""
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if fd is not None:
                os.close(fd)
