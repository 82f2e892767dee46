"""How the pieces of an unfinished run (``parts.py``) become Parquet: a journal one part, all pieces one file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradtrace.trace.arrow import ARROW_SCHEMA
from gradtrace.trace.journal import checksums_of, read_contents
from gradtrace.trace.parts import MERGED_FILE, journal_file, part_of, pieces
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import COLUMNS
from gradtrace.trace.seal import find_damage, seal

ROWS_PER_GROUP = 131_072
"""Rows of a Parquet row group: small enough to skip, large enough to compress."""

_FLOATS = [column.name for column in COLUMNS if column.type == "double"]
# Everything but the measured values and the row numbers repeats itself and is best kept as a dictionary.
# Level 3 takes 6-8 % off the default's bytes at its speed, level 9 another 4 % at half of it.
_PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": [column.name for column in COLUMNS if column.name not in [*_FLOATS, "seq"]],
    "column_encoding": {"seq": "DELTA_BINARY_PACKED"} | dict.fromkeys(_FLOATS, "BYTE_STREAM_SPLIT"),
}


def encode(directory: Path, index: int) -> pa.Table:
    """Turn journal ``index`` into a Parquet part and return its rows.

    Raises:
        OSError: the part cannot be written, or the journal is not what was written to it; it stays as it is.
    """
    journal = journal_file(directory, index)
    table, end = read_contents(journal)
    if end != "whole":
        raise _damaged(journal, end)
    write_part(part_of(journal), table)
    for file in (journal, checksums_of(journal)):
        file.unlink(missing_ok=True)
    return table


def write_part(path: Path, table: pa.Table) -> None:
    """Put a part at ``path``, or another one in its place; whoever looks finds the old one or the new, whole."""
    temporary = path.with_suffix(".tmp")
    try:
        pq.write_table(table.unify_dictionaries(), temporary, row_group_size=ROWS_PER_GROUP, **_PARQUET)
        seal(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_part(path: Path) -> pa.Table:
    """Return the rows of a part."""
    return pa.concat_tables([ARROW_SCHEMA.empty_table(), *_groups(path)])


def merge(directory: Path, target: Path, info: RunInfo) -> None:
    """Write all pieces of ``directory`` as one Parquet file and put it at ``target``.

    The pieces stay as they are until the file is whole, so for that moment the disk holds the run twice. Memory is
    bounded by one piece.

    Raises:
        OSError: the file cannot be written, or a piece is damaged or missing; nothing is left of it.
    """
    merged = directory / MERGED_FILE
    schema = ARROW_SCHEMA.with_metadata({METADATA_KEY: info.to_json()})
    try:
        with pq.ParquetWriter(merged, schema, **_PARQUET) as writer:
            rows = 0
            for table in _regrouped(_tables(pieces(directory))):
                writer.write_table(table.unify_dictionaries(), ROWS_PER_GROUP)
                rows += table.num_rows
        if rows < info.records:
            raise _damaged(directory, f"{info.records - rows:,} of {info.records:,} records are missing")
        seal(merged)
        _reach_the_disk(merged)  # before the pieces are removed
        merged.replace(target)
    except BaseException:
        merged.unlink(missing_ok=True)
        raise


def _tables(files: Iterable[Path]) -> Iterator[pa.Table]:
    for file in files:
        if file.suffix != ".arrow":
            yield from _groups(file)
            continue
        rows, end = read_contents(file)
        if end == "damaged":  # it is cut off where a step could not be written, which has been said then
            raise _damaged(file, end)
        yield rows


def _groups(file: Path) -> Iterator[pa.Table]:
    with file.open("rb") as opened:
        damage = find_damage(opened.fileno())
    if damage:
        raise _damaged(file, damage)
    with pq.ParquetFile(file) as part:
        for group in range(part.num_row_groups):
            yield part.read_row_group(group).cast(ARROW_SCHEMA)


def _regrouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of ``ROWS_PER_GROUP``, the last one shorter."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(one.num_rows for one in waiting) < ROWS_PER_GROUP:
            continue
        joined = pa.concat_tables(waiting)
        whole = joined.num_rows - joined.num_rows % ROWS_PER_GROUP
        for start in range(0, whole, ROWS_PER_GROUP):
            yield joined.slice(start, ROWS_PER_GROUP)
        waiting = [joined.slice(whole)]
    if any(table.num_rows for table in waiting):
        yield pa.concat_tables(waiting)


def _damaged(path: Path, how: str) -> OSError:
    """Return the error of a piece that must not be replaced by what can still be read of it."""
    return OSError(errno.EIO, f"damaged: {how}", os.fspath(path))


def _reach_the_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
