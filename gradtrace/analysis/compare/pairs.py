"""The boundaries of two runs side by side, as views on one DuckDB connection, aligned and measured a stretch at a time.

A boundary is aligned by step, micro_step, phase, module, call, tensor and path; where a run has several such records,
the first with the first and so on. Events, replays and rows of single operations are no boundaries. Learning rates and
loss scales are settings: ``scalar_changes``.

Ten million rows against as many are joined in stretches of a million, so that they need memory for a million.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb

from gradtrace.analysis.compare import sql
from gradtrace.analysis.compare.parts import ScalarChange
from gradtrace.analysis.recording import Recording
from gradtrace.analysis.views import native_connection
from gradtrace.trace.schema import COLUMN_NAMES, Record

ROWS_AT_ONCE = 1_000_000


class Step(NamedTuple):
    """A step of one run: its number of records, and whether it was captured in full."""

    records: int
    full: bool


class Place(NamedTuple):
    """A pair of records, by its numbers in both runs, with how far apart they are and may be."""

    step: int
    rank_a: int
    rank_b: int
    seq_a: int
    seq_b: int
    difference: float
    tolerance: float


@dataclass
class Group:
    """What one stretch says of one module: counts, first steps of what is in one run only, two places."""

    module: str | None
    dtypes: tuple[str, str] | None
    devices: tuple[str, str] | None
    compared: int
    differing: int
    only_a: int
    first_only_a: int | None
    only_b: int
    first_only_b: int | None
    first: Place | None
    worst: Place | None


class Aligned:
    """Two recordings on one connection, a rank of each. Close it, or use it as a context manager."""

    def __init__(self, a: Recording, b: Recording) -> None:
        self._connection = native_connection()
        a.show_to(self._connection, "records_a")
        b.show_to(self._connection, "records_b")
        self._ranks = {"rank_a": 0, "rank_b": 0}

    def take_ranks(self, rank_a: int, rank_b: int) -> None:
        """Look at these ranks from now on."""
        self._ranks = {"rank_a": rank_a, "rank_b": rank_b}

    def kinds(self, name: str) -> set[tuple[str, str]]:
        """Return the pairs of dtype and device that run ``name``, "a" or "b", holds."""
        found = self._fetch(sql.KINDS.format(view=f"records_{name}"), rank=self._ranks[f"rank_{name}"])
        return {(dtype or "", device or "") for dtype, device in found}

    def steps(self, name: str, first: int | None, end: int | None) -> dict[int, Step]:
        """Return the steps of run ``name``, "a" or "b", from ``first`` up to, not including, ``end``."""
        query = sql.STEPS.format(view=f"records_{name}")
        found = self._fetch(query, rank=self._ranks[f"rank_{name}"], first=first, end=end)
        return {step: Step(records, full) for step, records, full in found}

    def share(self, steps: Iterable[tuple[int, bool]]) -> None:
        """Compare these steps from now on; each with whether both runs have it in full."""
        rows = list(steps)
        self._connection.execute(
            "CREATE OR REPLACE TABLE shared_steps AS "
            "SELECT unnest(?::BIGINT[]) AS step, unnest(?::BOOLEAN[]) AS full_steps",
            [[step for step, _ in rows], [full for _, full in rows]],
        )

    def groups(
        self, first: int, last: int, tolerances: dict[str, float], modules: Collection[str] | None
    ) -> Iterator[Group]:
        """Yield what differs in the shared steps from ``first`` to ``last``, by module, in no order."""
        numbered = any(self._repeats(name, first, last) for name in "ab")
        query = sql.stretch(tolerances, modules, numbered=numbered)
        more = {} if modules is None else {"modules": list(modules)}
        for row in self._fetch(query, first=first, last=last, **self._ranks, **more):
            module, dtype_a, dtype_b, device_a, device_b, counts, earliest, worst = row
            dtypes = None if dtype_a is None else (dtype_a, dtype_b)
            devices = None if device_a is None else (device_a, device_b)
            yield Group(module, dtypes, devices, **counts, first=self._place(earliest), worst=self._place(worst))

    def scalar_changes(self, rtol: float) -> list[ScalarChange]:
        """Return learning rates and loss scales that differ in the shared steps, the first to do so first."""
        found = self._fetch(sql.SCALARS, rtol=rtol, **self._ranks)
        rank = self._ranks["rank_a"]
        return [ScalarChange(tensor, path, rank, step, a, b, records) for tensor, path, step, a, b, records in found]

    def records(self, places: Iterable[Place]) -> dict[Place, tuple[Record, Record]]:
        """Return the records of each place."""
        wanted = list(dict.fromkeys(places))
        a = self._records("a", {(place.rank_a, place.seq_a) for place in wanted})
        b = self._records("b", {(place.rank_b, place.seq_b) for place in wanted})
        return {place: (a[place.rank_a, place.seq_a], b[place.rank_b, place.seq_b]) for place in wanted}

    def close(self) -> None:
        """Let go of the connection; the recordings stay open."""
        self._connection.close()

    def __enter__(self) -> Aligned:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repeats(self, name: str, first: int, last: int) -> bool:
        """Whether a run has several records of one boundary in some step."""
        query = sql.REPEATED.format(view=f"records_{name}")
        return bool(self._fetch(query, rank=self._ranks[f"rank_{name}"], first=first, last=last))

    def _records(self, name: str, numbers: set[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        columns = ", ".join(f'"{column}"' for column in COLUMN_NAMES)
        query = f"SELECT {columns} FROM records_{name} WHERE rank IN $ranks AND seq IN $numbers"
        ranks = sorted({rank for rank, _ in numbers})
        found = self._fetch(query, ranks=ranks, numbers=sorted({seq for _, seq in numbers})) if numbers else []
        rows = (Record(**dict(zip(COLUMN_NAMES, row, strict=True))) for row in found)
        return {(row.rank, row.seq): row for row in rows}

    def _place(self, found: dict[str, Any] | None) -> Place | None:
        if found is None:
            return None
        return Place(
            step=found["step"],
            **self._ranks,
            seq_a=-found["earliest"],
            seq_b=found["seq_b"],
            difference=found["difference"],
            tolerance=found["tolerance"],
        )

    def _fetch(self, query: str, **parameters: Any) -> list[tuple[Any, ...]]:
        found: duckdb.DuckDBPyConnection = self._connection.execute(query, parameters)
        return found.fetchall()
