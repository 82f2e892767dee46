"""The seal of a finished Parquet file: checksums by which a reader tells what was written from what has changed since.

Parquet has none that its readers look at, and of the bits of a data page most can flip without an error: other numbers
are read. The seal stands between the rows and the footer, where no reader of Parquet looks. It has a checksum for each
block of what stands before it, and one for the footer, which holds what row groups are skipped by.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

BLOCK = 2**22
"""Bytes under one checksum: few enough to say where a file is damaged."""

_MANY = 4
_THREADS = 8
"""From so many blocks on several are summed at a time."""

_NAME = b"gtseal01"
_COUNT = struct.Struct("<I8s")
_END = struct.Struct("<I4s")
_PARQUET = b"PAR1"


def seal(path: Path) -> None:
    """Seal a Parquet file that has just been written.

    Raises:
        OSError: it cannot be written; the file is broken then.
    """
    with path.open("r+b") as file:
        start = file.seek(0, os.SEEK_END) - _END.size
        file.seek(start)
        start -= _END.unpack(file.read())[0]
        file.seek(start)
        footer = file.read()
        sums = [*_sums(file.fileno(), start), zlib.crc32(footer)]
        file.seek(start)
        file.write(struct.pack(f"<{len(sums)}I", *sums) + _COUNT.pack(len(sums), _NAME) + footer)


def find_damage(fd: int) -> str | None:
    """Return which bytes of a Parquet file are not those that were sealed, in words, None when all of them are.

    A file without a seal, written by another program or an older gradtrace, is taken as it is.

    Raises:
        OSError: it cannot be read.
    """
    size = os.fstat(fd).st_size
    if size < _END.size:
        return None
    length, magic = _END.unpack(os.pread(fd, _END.size, size - _END.size))
    footer = size - _END.size - length
    if magic != _PARQUET or footer < _COUNT.size:
        return None
    count, name = _COUNT.unpack(os.pread(fd, _COUNT.size, footer - _COUNT.size))
    if name != _NAME:
        return None
    start = footer - _COUNT.size - 4 * count
    if start < 0 or count != -(-start // BLOCK) + 1:
        return "its checksums have changed"
    *rows, end = struct.unpack(f"<{count}I", os.pread(fd, 4 * count, start))
    if zlib.crc32(os.pread(fd, size - footer, footer)) != end:
        return "its footer is not what was written"
    pairs = enumerate(zip(rows, _sums(fd, start), strict=True))
    bad = [number for number, (wanted, found) in pairs if wanted != found]
    return _in_words(bad, start) if bad else None


def _sums(fd: int, end: int) -> Iterable[int]:
    """Return the checksums of the blocks from the start of a file to ``end``."""
    starts = range(0, end, BLOCK)

    def of_block(start: int) -> int:
        return zlib.crc32(os.pread(fd, min(BLOCK, end - start), start))

    if len(starts) >= _MANY:
        with suppress(RuntimeError):  # an interpreter that exits starts no thread
            from concurrent.futures import ThreadPoolExecutor  # slow to import; sums and reads hold no lock of Python's

            with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _THREADS)) as threads:
                return list(threads.map(of_block, starts))
    return map(of_block, starts)


def _in_words(bad: Sequence[int], end: int) -> str:
    first, last = bad[0] * BLOCK, min((bad[-1] + 1) * BLOCK, end)
    return f"its bytes {first:,} to {last:,} are not what was written"
