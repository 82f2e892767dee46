"""Locks on the place of a run: one that is held for as long as somebody writes there, one for those who change it.

The kernel lets go of both when their process dies, however it dies. Some network file systems cannot lock; what
then tells more is in ``process.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from gradtrace.trace.descriptor import Descriptor
from gradtrace.trace.sent import let_pass


class Hold:
    """The lock on a directory, from now until ``release``; ``locked`` is false where it could not be had.

    A forked child does not hold it, nor does the program that this one makes way for.
    """

    def __init__(self, directory: Path) -> None:
        """Never waits.

        Raises:
            OSError: there is no such directory.
        """
        self._directory = Descriptor(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.locked = False
        with contextlib.suppress(OSError):
            fcntl.flock(self._directory.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
        _holds.add(self)

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is still the directory that is held."""
        try:
            return os.path.samestat(self._directory.file, os.stat(path))
        except OSError as error:
            let_pass(error)
            return False

    def release(self) -> None:
        """Let go. Releasing twice is harmless."""
        self._directory.close()


_holds: weakref.WeakSet[Hold] = weakref.WeakSet()


def _release_in_child() -> None:
    for hold in list(_holds):
        hold.release()


os.register_at_fork(after_in_child=_release_in_child)


def is_held(directory: Path) -> bool | None:
    """Whether somebody holds the lock on ``directory``; None where that cannot be said."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def one_at_a_time(run_path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of ``run_path`` among all processes; its file is gone afterwards.

    Raises:
        BlockingIOError: another process has it, and ``wait`` is false.
        OSError: the directory cannot be written; without ``wait`` also where nothing can be locked.
    """
    lock = run_path.with_name(f".{run_path.name}.lock")
    fd = _locked(lock, wait=wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # where it has to stay it is in nobody's way
            lock.unlink(missing_ok=True)
        os.close(fd)


def _locked(lock: Path, *, wait: bool) -> int:
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not wait:
                os.close(fd)
                raise
            # A file system that cannot lock; ranks there can still meet, only not in the same instant.
        if _is_file(fd, lock):
            return fd
        os.close(fd)  # the one before us removed the file while we waited


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
