"""What Arrow makes of the columns of a trace: the schema of every file, and rows as record batches.

Apart from ``schema.py``, because importing pyarrow takes longer than many a question to a finished file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from gradtrace.trace.schema import COLUMN_NAMES, COLUMNS, Record, Type

_TYPES: dict[Type, pa.DataType] = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "string": pa.dictionary(pa.int32(), pa.string()),
    "timestamp[us, tz=UTC]": pa.timestamp("us", tz="UTC"),
}
_KINDS = {column.name: _TYPES[column.type] for column in COLUMNS}
ARROW_SCHEMA = pa.schema([(column.name, _TYPES[column.type]) for column in COLUMNS])


def batch_of_records(records: Iterable[Record]) -> pa.RecordBatch:
    """Return the records as one Arrow batch with ``ARROW_SCHEMA``."""
    rows = list(records)
    return batch_of_columns({name: [getattr(row, name) for row in rows] for name in COLUMN_NAMES})


def batch_of_columns(columns: Mapping[str, list[Any] | pa.Array[Any]]) -> pa.RecordBatch:
    """Return columns of equal length as one Arrow batch with ``ARROW_SCHEMA``.

    ``columns`` maps every name in ``COLUMN_NAMES`` to a list of Python values (``None`` is NULL) or to an
    Arrow array of the column's own type.
    """
    arrays = [
        values if isinstance(values := columns[name], pa.Array) else array_of(name, values) for name in COLUMN_NAMES
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def array_of(name: str, values: list[Any]) -> pa.Array[Any]:
    """Return the column ``name`` as an Arrow array; ``None`` is NULL."""
    kind = _KINDS[name]
    if kind is _TYPES["string"]:
        return _words(values).dictionary_encode()
    array: pa.Array[Any] = pa.array(values, kind)
    return array


def _words(values: list[str | None]) -> pa.Array[Any]:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # Half of a character, as Python has it for a byte of a file's name that is no UTF-8, is written as its escape.
        whole = [value and value.encode(errors="backslashreplace").decode() for value in values]
        return pa.array(whole, pa.string())


def repeated(name: str, value: Any, count: int) -> pa.Array[Any]:
    """Return the column ``name`` with one value in all its rows; a list of times is slow to convert."""
    kind: Any = _KINDS[name]  # the stubs know a scalar's type only where it is written out
    array: pa.Array[Any] = pa.repeat(pa.scalar(value, kind), count)
    return array
