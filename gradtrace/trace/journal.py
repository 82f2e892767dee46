"""The journal of a run that is being recorded: an Arrow IPC stream to which every step's rows are appended.

Whatever ``Journal.append`` has returned from is with the operating system and survives the death of the
process. The last message of a journal may be cut off. Beside it stand the checksums of all that was appended, so that
what is no longer as it was written is seen to be so. ``read_journal`` reads what stands before either.

Writing is in the training's way, so a journal has the rows as they come; what is made of them is the reader's work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from gradtrace.trace.arrow import ARROW_SCHEMA
from gradtrace.trace.descriptor import Descriptor

_SINGLE = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""Types whose norm has the precision of a float32: it is the sum of that many squares in float32, or its root."""

_BUFFER = 2**18
"""Bytes of a step that are collected before they are written; a larger step takes several system calls."""

_REST = 52 - 23
"""Bits by which the fraction of a float64 is longer."""

_ENTRY = struct.Struct("<II")
"""Of each write: how many bytes, and their checksum."""


def checksums_of(journal: Path) -> Path:
    """Return where the checksums of a journal stand."""
    return journal.with_suffix(".crc")


End = Literal["whole", "cut off", "damaged"]
"""How a journal ends; cut off is what an append had not finished, damaged what it had."""


class Contents(NamedTuple):
    """What a journal holds: the rows up to its end, or up to where it is cut off or damaged."""

    rows: pa.Table
    end: End


class Journal:
    """One journal file, open for appending."""

    def __init__(self, path: Path) -> None:
        """Create the file; it must not exist."""
        self.path = path
        self.rows = 0
        self._sink = _Sink(path)
        sink: Any = self._sink  # the stubs ask for more of a file than Arrow does
        # A message comes in dozens of small pieces, which are to be one system call.
        self._file = pa.BufferedOutputStream(pa.PythonFile(sink, "w"), _BUFFER)
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        self._stream = pa.ipc.new_stream(self._file, ARROW_SCHEMA, options=options)

    @property
    def bytes(self) -> int:
        """Number of bytes that the file has."""
        return self._sink.bytes

    def append(self, batch: pa.RecordBatch) -> None:
        """Append the rows and hand them to the operating system in one go.

        Raises:
            OSError: the file system takes no more. The journal ends with the rows before: append nothing after them.
        """
        before = self._sink.lengths
        try:
            self._stream.write_batch(batch)
            self._file.flush()
        except BaseException:
            self._sink.cut(before)
            raise
        self.rows += batch.num_rows

    def close(self) -> None:
        """Close the file; a reader needs no end mark. Closing twice is harmless."""
        if not self._sink.closed:
            with contextlib.suppress(OSError):  # of a full disk, which has been said when it was written to
                self._file.close()
            self._sink.close()


class _Sink:
    """The two files that Arrow's bytes end in. After a write that failed nothing follows."""

    def __init__(self, path: Path) -> None:
        self.bytes = self._checked = 0
        self.closed = False
        self._broken = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._data = Descriptor(path, flags)
        try:
            self._checksums = Descriptor(checksums_of(path), flags)
        except OSError:
            self._data.close()
            raise

    def write(self, data: bytes) -> int:
        if self._broken:
            raise OSError(errno.EIO, "an earlier write to it failed")
        self._broken = True  # until it is through: a signal handler may raise in between
        for written in _pieces_written(self._data, data):
            self.bytes += written
        for written in _pieces_written(self._checksums, _ENTRY.pack(len(data), zlib.crc32(data))):
            self._checked += written
        self._broken = False
        return len(data)

    @property
    def lengths(self) -> tuple[int, int]:
        """How long both files are."""
        return self.bytes, self._checked

    def cut(self, lengths: tuple[int, int]) -> None:
        """Take back what has been written since the files had these lengths, as far as that is possible."""
        self._broken = True
        with contextlib.suppress(OSError):
            # The checksums first: there is never one of what is not there.
            os.ftruncate(self._checksums.number, lengths[1])
            os.ftruncate(self._data.number, lengths[0])
            self.bytes, self._checked = lengths

    def flush(self) -> None:
        """Do nothing: there is no buffer here."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._data.close()
            self._checksums.close()


def _pieces_written(file: Descriptor, data: bytes) -> Iterator[int]:
    """Write all of the data; yield the number of bytes that each system call has taken."""
    rest = memoryview(data)
    while rest:
        written = os.write(file.number, rest)
        yield written
        rest = rest[written:]


def read_journal(path: Path) -> pa.Table:
    """Return the rows of every whole message of a journal, be it cut off, empty or still written to.

    Raises:
        OSError: the file cannot be read at all.
    """
    return read_contents(path).rows


def read_contents(path: Path) -> Contents:
    """Return the rows of a journal and how it ends.

    Raises:
        OSError: the file cannot be read at all.
    """
    data, end = _verified(path)
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(data) as messages:
            if not messages.schema.equals(ARROW_SCHEMA):
                return Contents(ARROW_SCHEMA.empty_table(), "damaged")
            for batch in messages:
                if not _is_sound(batch):
                    end = "damaged"
                    break
                batches.append(batch)
    except (pa.ArrowException, OSError):
        end = "cut off" if end == "whole" and data else end
    return Contents(_with_short_norms(pa.Table.from_batches(batches, ARROW_SCHEMA)), end)


def _is_sound(batch: pa.RecordBatch) -> bool:
    """Whether the rows may be looked at: their indices and offsets lie within their buffers."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _verified(path: Path) -> tuple[bytes, End]:
    """Return the bytes of a journal up to those that are not as they were written.

    What has no checksum, written just now or by somebody else, is taken as it is.
    """
    try:
        # Before the data: there is never a checksum of what is not there yet.
        entries = checksums_of(path).read_bytes()
    except FileNotFoundError:
        entries = b""
    data, place = path.read_bytes(), 0
    view = memoryview(data)
    for length, checksum in _ENTRY.iter_unpack(entries[: len(entries) - len(entries) % _ENTRY.size]):
        end = place + length
        if not length or end > len(data) or zlib.crc32(view[place:end]) != checksum:
            return data[:place], "damaged"
        place = end
    return data, "whole"


def _with_short_norms(table: pa.Table) -> pa.Table:
    """Round norms to the precision that they have: 29 bits of noise less a row, and nothing that is compared.

    Only the fraction is rounded. A norm beyond the range of float32 stays what it is.
    """
    if not table.num_rows:
        return table
    compute: Any = pc  # Its stubs refuse a Python value where the functions take one.
    norm: Any = pa.concat_arrays(table["norm"].chunks)
    rounded = compute.bit_wise_and(compute.add(norm.view(pa.int64()), 1 << (_REST - 1)), -1 << _REST)
    single = compute.is_in(table["dtype"].cast(pa.string()), value_set=pa.array(_SINGLE))
    return table.set_column(
        ARROW_SCHEMA.get_field_index("norm"), "norm", compute.if_else(single, rounded.view(pa.float64()), table["norm"])
    )
