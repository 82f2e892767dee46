"""Whether a Parquet file is a piece of a recording at all, and unchanged: asked before anything is read of it.

What is said of a file follows on its name: "is cut off: ...".
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradtrace.errors import NotARunError
from gradtrace.trace.runinfo import METADATA_KEY
from gradtrace.trace.schema import COLUMNS, Type
from gradtrace.trace.seal import find_damage

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

AGAIN = "copy it again from where it was recorded"

TOO_MANY_FILES = "it has more files than may be open at a time; allow more (ulimit -n)"

_TYPES: dict[Type, str] = {
    "int32": "INTEGER",
    "int64": "BIGINT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "timestamp[us, tz=UTC]": "TIMESTAMP WITH TIME ZONE",
}
_NEVER_NULL = ("rank", "step", "micro_step", "seq", "phase", "tensor", "path")
_MAGIC = 4
_SHORTEST = 12
_SHOWN = 200
_KIND = re.compile(r"^[A-Za-z ]+? Error: ")

_COUNTED = ("step", "micro_step", "seq", "call", "numel", "nan_count", "posinf_count", "neginf_count")
_MOST = 2**53

# A scan for each, because then the statistics of the row groups answer, and nothing of a sound file is read.
_IMPOSSIBLE = " UNION ALL ".join(
    f"(SELECT filename, '{name}' FROM read_parquet($files, filename = true) WHERE {condition} LIMIT 1)"
    for name, condition in (
        *((name, f"{name} IS NULL") for name in _NEVER_NULL),
        *((name, f"{name} NOT BETWEEN 0 AND {_MOST}") for name in _COUNTED),
    )
)


class DamagedError(NotARunError):
    """A file is not what a recording wrote there."""

    def __init__(self, path: object, problem: str) -> None:
        """``problem`` follows on the name of the file."""
        super().__init__(f"{path} {problem}")


def problem_of(error: Exception, path: object) -> str:
    """Return what is wrong with a file, as it follows on its name, from any error that came of reading it."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, NotARunError):
        return str(error.args[0]).removeprefix(f"{path} ")
    first_line = _KIND.sub("", str(error).strip().partition("\n")[0])
    if first_line.endswith(os.strerror(errno.EMFILE)):
        return f"cannot be read: {TOO_MANY_FILES}"
    return f"is damaged: DuckDB says {first_line[:_SHOWN]!r}; {AGAIN}"


@dataclass(frozen=True)
class Extent:
    """What a piece of a recording spans; None where it has no rows."""

    first_step: int | None
    last_step: int | None
    first_seq: int | None
    last_seq: int | None
    ranks: tuple[int, int] | None
    rows: int


def demand_whole(path: object, fd: int) -> None:
    """Look at the bytes of a file: is it Parquet from end to end, and as it was written?

    Raises:
        DamagedError: it is not.
        OSError: it cannot be read.
    """
    size = os.fstat(fd).st_size
    head, tail = os.pread(fd, _MAGIC, 0), os.pread(fd, _MAGIC, max(size - _MAGIC, 0))
    if b"PARE" in (head, tail):
        raise DamagedError(path, "is an encrypted Parquet file; decrypt it first")
    if head != b"PAR1":
        raise DamagedError(path, "is not a Parquet file; name what `gradtrace record` wrote")
    if tail != b"PAR1" or size < _SHORTEST:
        raise DamagedError(path, f"is cut off: it begins as a Parquet file and has no end; {AGAIN}")
    if damage := find_damage(fd):
        raise DamagedError(path, f"is damaged: {damage}; {AGAIN}")


def demand_columns(path: object, file: str, connection: duckdb.DuckDBPyConnection) -> None:
    """Look at the columns of a Parquet file and their types.

    ``file`` is what DuckDB is to open.

    Raises:
        DamagedError: they are not those of a recording.
        duckdb.Error: DuckDB cannot read it.
    """
    name = {"file": glob.escape(file)}
    described = connection.execute("DESCRIBE SELECT * FROM read_parquet($file)", name).fetchall()
    there = {column: kind for column, kind, *_ in described}
    for column in COLUMNS:
        kind = there.get(column.name)
        if kind is None:
            raise DamagedError(path, f"has no column {column.name}: another program has changed it")
        if kind != _TYPES[column.type]:
            found = f"the column {column.name} as {kind}, not {_TYPES[column.type]}"
            raise DamagedError(path, f"has {found}: another program has changed it")


def demand_values(files: Mapping[str, object], connection: duckdb.DuckDBPyConnection) -> None:
    """Look for NULLs and numbers that no recording has; ``files`` maps what DuckDB is to open to what is said of it.

    Raises:
        DamagedError: there is one.
        duckdb.Error: DuckDB cannot read a file.
    """
    if not files:
        return
    names = {"files": [glob.escape(file) for file in files]}
    for file, column in connection.execute(_IMPOSSIBLE, names).fetchall():
        raise DamagedError(files[file], _impossible(column))


def demand_values_of_rows(path: object, rows: pa.Table) -> None:
    """Look for the same in the rows of a journal.

    Raises:
        DamagedError: there is one.
    """
    import pyarrow.compute

    compute: Any = pyarrow.compute  # its stubs take a column for a list
    for name in _NEVER_NULL:
        if rows[name].null_count:
            raise DamagedError(path, _impossible(name))
    for name in _COUNTED:
        least, most = compute.min_max(rows[name]).as_py().values()
        if least is not None and not 0 <= least <= most <= _MOST:
            raise DamagedError(path, _impossible(name))


def _impossible(column: str) -> str:
    return f"has rows with an impossible value, or none, in the column {column}: another program has changed it"


def metadata_of(path: object, file: str, connection: duckdb.DuckDBPyConnection) -> bytes:
    """Return the facts of the run that a Parquet file has.

    Raises:
        NotARunError: it has none.
        duckdb.Error: DuckDB cannot read it.
    """
    query = "SELECT value FROM parquet_kv_metadata(?) WHERE key = ?"
    found = connection.execute(query, [glob.escape(file), METADATA_KEY]).fetchall()
    if not found:
        raise NotARunError(f"{path} is a Parquet file, but not a gradtrace run")
    if len(found) > 1:
        raise DamagedError(path, "has the facts of several runs: another program has changed it")
    value: bytes = found[0][0]
    return value


def extent_of(file: str, connection: duckdb.DuckDBPyConnection) -> Extent:
    """Return what a piece spans.

    Raises:
        duckdb.Error: DuckDB cannot read it.
    """
    query = """
        SELECT min(step), max(step), min(seq), max(seq), min(rank), max(rank), count(*) FROM read_parquet($file)"""
    *ends, lowest, highest, rows = connection.execute(query, {"file": glob.escape(file)}).fetchall()[0]
    first_step, last_step, first_seq, last_seq = ends
    return Extent(first_step, last_step, first_seq, last_seq, None if lowest is None else (lowest, highest), rows)
