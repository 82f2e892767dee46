"""DuckDB connections with the views of a run: one that reads the files itself, and one that is shut off.

Both hold the same views (``views.sql``). The first is the library's own: DuckDB reads the Parquet files,
skips row groups and is fast. The second, for queries of other people, gets its rows through Arrow and may
open nothing (``sandbox.py``).
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import islice
from typing import TYPE_CHECKING, Any

import duckdb

from gradtrace.analysis import sandbox
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import COLUMN_NAMES, LARGE_FOOTERS

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset

_MODULE_TABLE = {
    "module": "VARCHAR",
    "number": "INTEGER",
    "type": "VARCHAR",
    "root": "BOOLEAN",
    "depth": "INTEGER",
    "file": "VARCHAR",
    "line": "INTEGER",
    "parameters": "BIGINT",
    "shapes": "MAP(VARCHAR, VARCHAR)",
    "calls": "BIGINT",
}
_HALVES = re.compile("[\\ud800-\\udfff]")

_ROWS_AT_ONCE = 2_000
"""Of a million modules DuckDB would take more than ten times the memory of their JSON."""

# Row by row: rows that are read as one list of structures take DuckDB five times as long.
_FROM_JSON = """
SELECT unnest(from_json(one, ?)) FROM (SELECT unnest(from_json(?, '["JSON"]')) AS one)
"""

_MOST = 2**63 - 1
_META_TABLE = {"rank": "INTEGER", "key": "VARCHAR", "value": "VARCHAR"}

# Arrow keeps times with their zone, which DuckDB shows in the reader's; all times of a trace are UTC.
_COLUMNS = ", ".join(
    'make_timestamp(epoch_us("time")) AS "time"' if name == "time" else f'"{name}"' for name in COLUMN_NAMES
)


def native_connection() -> duckdb.DuckDBPyConnection:
    """Return a connection that may read files."""
    connection = duckdb.connect(config=sandbox.ALONE | {"temp_directory": _own_directory()})
    sandbox.silence(connection)
    # A verdict asks some twenty questions of one file: its footer is read once.
    connection.execute("SET parquet_metadata_cache = true")
    return connection


def add_records(
    connection: duckdb.DuckDBPyConnection,
    parquet: Sequence[str],
    journals: Sequence[pa.Table],
    view: str = "records",
) -> None:
    """Add the view ``records``, or one of another name, over Parquet files and rows from journals."""
    files = ", ".join(_quoted(glob.escape(path)) for path in parquet)
    _add_records(connection, f"read_parquet([{files}])" if parquet else None, journals, view)


def _own_directory() -> str:
    """Return a path for what does not fit into memory: DuckDB's default, .tmp, is where the user stands."""
    return os.path.join(tempfile.gettempdir(), f"gradtrace-{uuid.uuid4()}")


def filled_connection(
    parquet: Sequence[str], journals: Sequence[pa.Table], infos: Sequence[RunInfo]
) -> duckdb.DuckDBPyConnection:
    """Return a connection with all views, which needs no access to anything else and can be locked."""
    connection = sandbox.open_connection()
    if parquet:
        import pyarrow.dataset  # slow to import, and only needed here

        from gradtrace.trace.arrow import ARROW_SCHEMA

        files = pyarrow.dataset.dataset(list(parquet), schema=ARROW_SCHEMA, format=_parquet_with_large_footers())
        connection.register("parquet_rows", files)
    _add_records(connection, "parquet_rows" if parquet else None, journals, "records")
    add_views(connection, infos)
    return connection


def _parquet_with_large_footers() -> pyarrow.dataset.ParquetFileFormat:
    """Return the format as Arrow reads it where a footer is larger than Arrow likes."""
    import pyarrow.dataset

    options = pyarrow.dataset.ParquetFragmentScanOptions(**LARGE_FOOTERS)
    return pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=options)


def add_views(connection: duckdb.DuckDBPyConnection, infos: Sequence[RunInfo]) -> None:
    """Add every view but ``records`` to a connection."""
    _add_table(connection, "module_table", _MODULE_TABLE, _module_rows(infos))
    _add_table(connection, "meta_table", _META_TABLE, _meta_rows(infos))
    connection.execute(resources.files("gradtrace.analysis").joinpath("views.sql").read_text(encoding="utf-8"))


def _module_rows(infos: Sequence[RunInfo]) -> Iterator[dict[str, Any]]:
    """Yield the modules of all ranks in model order, each once."""
    modules: dict[str, ModuleInfo] = {}
    for info in infos:
        for module in info.modules:
            modules.setdefault(module.name, module)
    for number, module in enumerate(modules.values()):
        yield {
            "module": module.name,
            "number": number,
            "type": module.type,
            "root": module.root,
            "depth": module.depth,
            "file": module.file,
            "line": module.line,
            "parameters": min(sum(elements(shape) for shape in module.parameters.values()), _MOST),
            "shapes": module.parameters,
            "calls": module.calls,
        }


def _meta_rows(infos: Sequence[RunInfo]) -> list[dict[str, Any]]:
    """Return the facts of each rank as keys and values; what is no text is JSON."""
    rows = []
    for info in infos:
        for key in (field.name for field in dataclasses.fields(info) if field.name != "modules"):
            value = getattr(info, key)
            text = value if isinstance(value, str) or value is None else json.dumps(value)
            rows.append({"rank": info.rank, "key": key, "value": text})
    return rows


def _add_table(
    connection: duckdb.DuckDBPyConnection, name: str, columns: dict[str, str], rows: Iterable[dict[str, Any]]
) -> None:
    """Make a table by way of JSON, some rows at a time: Arrow's conversion of Python values would import pandas."""
    connection.execute(f"CREATE TABLE {name} ({', '.join(f'{column} {kind}' for column, kind in columns.items())})")
    kinds, waiting = json.dumps(columns), iter(rows)
    while some := list(islice(waiting, _ROWS_AT_ONCE)):
        connection.execute(f"INSERT INTO {name} {_FROM_JSON}", [kinds, _json(some)])


def _json(rows: list[dict[str, Any]]) -> str:
    """Return rows as JSON that DuckDB takes: half a character, as a file's name may have it, becomes its escape."""
    return _HALVES.sub(lambda half: f"\\\\u{ord(half[0]):04x}", json.dumps(rows, ensure_ascii=False))


def elements(shape: str) -> int:
    """Return the number of elements of a shape as the trace writes it: "[8, 128]"; of anything else 0."""
    sizes = shape.strip("[]")
    try:
        return math.prod(int(size) for size in sizes.split(",")) if sizes else 1
    except ValueError:
        return 0


def _add_records(
    connection: duckdb.DuckDBPyConnection, files: str | None, journals: Sequence[pa.Table], view: str
) -> None:
    scans = [files] if files else []
    if journals or not files:
        import pyarrow as pa

        from gradtrace.trace.arrow import ARROW_SCHEMA

        connection.register("arrow_rows", pa.concat_tables([ARROW_SCHEMA.empty_table(), *journals]))
        connection.execute(f"CREATE TABLE journal_{view} AS FROM arrow_rows")
        connection.unregister("arrow_rows")
        scans.append(f"journal_{view}")
    selects = " UNION ALL ".join(f"SELECT {_COLUMNS} FROM {scan}" for scan in scans)
    connection.execute(f"CREATE VIEW {view} AS {selects}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
