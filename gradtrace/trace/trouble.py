"""What is wrong with a place that takes no more, in words for those who look after the machine."""

from __future__ import annotations

import errno
import os

_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EFBIG: "a file has reached the largest size that is allowed (ulimit -f)",
    errno.EMFILE: "the process has too many files open (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EBADF: "its files have been closed by the script",
    errno.EIO: "the disk reports an input/output error",
    errno.ENOENT: "the directory is gone: removed, moved or replaced",
    errno.ENOTDIR: "the directory is gone: removed, moved or replaced",
    errno.ESTALE: "the directory is gone: removed, moved or replaced",
}


def in_words(error: OSError) -> str:
    """Return why something cannot be written."""
    known = _WORDS.get(error.errno or 0)
    return known or " ".join(str(error.strerror or error).split()) or type(error).__name__


def gone(path: os.PathLike[str]) -> OSError:
    """Return the error of a directory that is not where it was any more, or is another one."""
    return FileNotFoundError(errno.ENOENT, "removed, moved or replaced", os.fspath(path))
