"""A little room that a recording holds back, so that its end can still be noted where nothing else can be written."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from gradtrace.trace.descriptor import Descriptor

RESERVE_FILE = "reserve.tmp"
_MORE = 8192
_GAVE_OUT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


class Reserve:
    """Bytes on the disk, and a file descriptor. Nothing of it is ever read."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE_FILE
        self._size = 0
        self._file: Descriptor | None = None

    def hold(self, size: int) -> None:
        """Hold back room for a file of ``size`` bytes.

        Raises:
            OSError: there is no room.
        """
        if self._file is None:
            self._file = Descriptor(self._path, os.O_WRONLY | os.O_CREAT)
        while self._size < size + _MORE:
            self._size += os.pwrite(self._file.number, bytes(size + _MORE - self._size), self._size)

    def helps(self, error: OSError) -> bool:
        """Give the room back, once, if the lack of it is the reason for ``error``; return whether that was so."""
        if self._file is None or error.errno not in _GAVE_OUT:
            return False
        self.give_back()
        return True

    def give_back(self) -> None:
        """Hold back nothing any more."""
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        if file is not None:
            file.close()
