"""The journal of a run that is being recorded: an Arrow IPC stream to which every step's rows are appended.

Whatever ``Journal.append`` has returned from is with the operating system and survives the death of the
process. The last message of a journal may be cut off; ``read_journal`` reads what stands before it.

Writing is in the training's way, so a journal has the rows as they come; what is made of them is the reader's work.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gradtrace.trace.arrow import ARROW_SCHEMA

_SINGLE = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
"""Types whose norm has the precision of a float32: it is the sum of that many squares in float32, or its root."""

_BUFFER = 2**18
"""Bytes of a step that are collected before they are written; a larger step takes several system calls."""

_REST = 52 - 23
"""Bits by which the fraction of a float64 is longer."""


class Journal:
    """One journal file, open for appending."""

    def __init__(self, path: Path) -> None:
        """Create the file; it must not exist."""
        self.path = path
        self.rows = 0
        self.bytes = 0
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        # A message comes in dozens of small pieces, which are to be one system call.
        self._file = pa.BufferedOutputStream(pa.OSFile(os.fspath(path), "ab"), _BUFFER)
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        self._stream = pa.ipc.new_stream(self._file, ARROW_SCHEMA, options=options)

    def append(self, batch: pa.RecordBatch) -> None:
        """Append the rows and hand them to the operating system in one go.

        Raises:
            OSError: the file system takes no more. The journal ends there: append nothing after it.
        """
        self._stream.write_batch(batch)
        self._file.flush()
        self.bytes = self._file.tell()
        self.rows += batch.num_rows

    def close(self) -> None:
        """Close the file; a reader needs no end mark. Closing twice is harmless."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # of a full disk, which has been said when it was written to
                self._file.close()


def read_journal(path: Path) -> pa.Table:
    """Return the rows of every whole message of a journal, be it cut off, empty or still written to.

    Raises:
        OSError: the file cannot be read at all.
    """
    data = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(data) as stream:
            batches.extend(stream)
    except (pa.ArrowException, OSError):
        pass  # The step in flight: the end of the data, within a message.
    return _with_short_norms(pa.Table.from_batches(batches, ARROW_SCHEMA))


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
