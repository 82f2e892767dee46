"""What a query may take, in time and in memory, and what is said when it takes more."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from gradtrace.errors import QueryLimitError
from gradtrace.setting_kinds import SIZE


class Allowance:
    """What DuckDB may take for one answer: ``timeout`` in seconds, None for any number, and bytes of ``memory``.

    Seconds are spent only while it works, not while its rows are looked at. Memory is that of its tables, sorts and
    joins; a single value that a function makes, and rows that Python holds, are not counted.
    """

    def __init__(self, timeout: float | None, memory: int | None) -> None:
        """Allow what is given; without a number half of the memory that is free."""
        self.memory = default_memory() if memory is None else memory
        self._timeout = timeout
        self._left = timeout

    @contextmanager
    def spend(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Let the connection work in this block as long as something is left.

        Raises:
            QueryLimitError: nothing is, be it that DuckDB was interrupted or that it could not be.
        """
        try:
            with self._in_time(connection):
                yield
        except (duckdb.OutOfMemoryException, MemoryError):
            most = f"{self.memory / 2**20:,.0f} MiB"
            raise QueryLimitError(f"the query needs more memory than {most}; a larger memory limit allows it") from None

    @contextmanager
    def _in_time(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        if self._left is None:
            yield
            return
        timer = threading.Timer(max(self._left, 0), connection.interrupt)
        timer.daemon = True
        started = time.monotonic()
        timer.start()
        try:
            yield
        except duckdb.Error:
            if time.monotonic() - started < self._left:
                raise
        finally:
            timer.cancel()
            self._left -= time.monotonic() - started
        if self._left <= 0:
            raise QueryLimitError(f"the query took longer than {self._timeout:g} s; a larger timeout allows it")


def default_memory() -> int:
    """Return half of the bytes that are free: DuckDB's own 80 % of all leave a training beside it nothing."""
    return min(_of_duckdb(), _free()) // 2


@functools.cache
def _of_duckdb() -> int:
    """Return DuckDB's own limit, which heeds that of a container."""
    with duckdb.connect() as connection:
        (text,) = connection.execute("SELECT current_setting('memory_limit')").fetchall()[0]
    size: int = SIZE.read(text)
    return size


def _free() -> int:
    """Return the bytes that programs can still have, as Linux says; elsewhere nothing is known of it."""
    try:
        facts = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        facts = ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", facts, re.MULTILINE)
    return 2**63 if found is None else int(found[1]) * 1024
