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
    arrays = [_array(columns[field.name], field.type) for field in ARROW_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)


def _array(values: list[Any] | pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_dictionary(kind):
        words: pa.Array[Any] = pa.array(values, kind.value_type)
        return words.dictionary_encode()
    array: pa.Array[Any] = pa.array(values, kind)
    return array
