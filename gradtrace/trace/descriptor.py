"""File descriptors that outlast a step: a script may close all of them, and have files of its own at their numbers."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


class Descriptor:
    """An open file or directory, until ``close``; ``file`` is what ``os.fstat`` says of it.

    What the script has at its number since is neither written to nor closed.
    """

    def __init__(self, path: Path, flags: int) -> None:
        """Open what is at ``path``.

        Raises:
            OSError: it cannot be opened.
        """
        self._fd: int | None = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self.file = os.fstat(self._fd)

    @property
    def number(self) -> int:
        """The number to be used at once.

        Raises:
            OSError: it is closed, by whomever.
        """
        if self._fd is None or not os.path.samestat(self.file, os.fstat(self._fd)):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._fd

    def close(self) -> None:
        """Close it. Closing twice is harmless."""
        with contextlib.suppress(OSError):
            fd, self._fd = self.number, None
            os.close(fd)
