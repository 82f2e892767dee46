"""What the verdict asks of the file: SQL queries that fetch few rows, whatever the size of the trace."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradtrace.analysis.verdict_model import Spread
from gradtrace.trace.incident import SMALLEST_LOSS_SCALE
from gradtrace.trace.schema import Record

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

# A verdict needs no wall clock.
_COLUMNS = ", ".join('NULL AS "time"' if name == "time" else f'"{name}"' for name in Record._fields)
_BAD = "(nan_count > 0 OR posinf_count > 0 OR neginf_count > 0)"
_COUNTS = ("nan_count", "posinf_count", "neginf_count")
_STATE = "tensor IN ('param', 'buffer')"
_ROWS_AT_ONCE = 20_000
_SCALARS = "('lr', 'loss_scale', 'grad_norm')"
_KEY = "module IS NOT DISTINCT FROM ? AND tensor = ? AND path = ?"

# Of each step and kind only the first record is needed, and the first with a NaN. A parameter that keeps the
# non-finite elements with which it started is left out here: there may be thousands of them in every step.
_THAT_MATTER = f"""
WITH start AS (
    SELECT rank, module, tensor, path, nan_count, posinf_count, neginf_count
    FROM bad_records WHERE phase = 'input' AND {_STATE}
),
found AS (
    SELECT * FROM bad_records
    WHERE tensor IN ('loss', 'grad') OR {_STATE}
    OR (tensor = 'output' AND nan_count > 0 AND phase <> 'recompute' AND list_contains(?, module))
),
changed AS (
    SELECT found.*, start.rank IS NOT NULL OR found.tensor = 'buffer' AS one_by_one
    FROM found LEFT JOIN start ON found.rank = start.rank AND found.tensor = start.tensor
        AND found.module IS NOT DISTINCT FROM start.module AND found.path = start.path
    WHERE found.phase = 'input' OR start.rank IS NULL OR found.nan_count <> start.nan_count
        OR found.posinf_count <> start.posinf_count OR found.neginf_count <> start.neginf_count
),
firsts AS (
    SELECT rank, min(seq) AS seq FROM changed
    GROUP BY rank, step, phase = 'input', tensor, nan_count > 0,
        CASE WHEN one_by_one THEN module END, CASE WHEN one_by_one THEN path END
)
SELECT {_COLUMNS} FROM bad_records SEMI JOIN firsts USING (rank, seq)
"""

_LOW_LOSS_SCALES = f"""
SELECT {_COLUMNS} FROM boundaries WHERE numel = 1 AND tensor = 'loss_scale' AND "max" < {SMALLEST_LOSS_SCALE}
"""


class Evidence:
    """Asks one run. Rows come back as records, in order of ``seq`` unless said otherwise.

    Rows of single operations (replay, op-level capture) are no evidence: only ``replay`` returns some. Nor are the
    gradient norms of watched steps: the gradient that made one non-finite has a row of its own.
    """

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._updates: dict[int, list[int]] = {}
        run.execute("CREATE OR REPLACE VIEW boundaries AS SELECT * FROM records WHERE op IS NULL")
        run.execute(f"CREATE OR REPLACE VIEW bad_records AS {self._bad_records()}")

    def steps(self) -> dict[int, list[int]]:
        """Return each rank's recorded steps, sorted."""
        info = self._run.info
        if len(self._run.infos) == 1 and info.steps:
            # Where no step is left out, the two ends tell all; counting reads the column of every row.
            first, last = self._fetch("SELECT min(step), max(step) FROM records")[0]
            if first is not None and last - first + 1 == info.steps <= info.records:
                return {info.rank: list(range(first, last + 1))}
        return self._steps_where("true")

    def skipped_steps(self) -> set[tuple[int, int]]:
        """Return (rank, step) of the steps whose optimizer step GradScaler skipped."""
        query = "SELECT DISTINCT rank, step FROM records WHERE phase = 'event' AND tensor = 'skip'"
        return set(self._fetch(query))

    @cached_property
    def watched_steps(self) -> dict[int, list[int]]:
        """Return each rank's steps that were not captured in full, sorted."""
        return self._steps_where("tensor = 'grad_norm'")

    def is_watched(self, rank: int, step: int) -> bool:
        """Whether a step was not captured in full."""
        steps = self.watched_steps.get(rank, [])
        place = bisect_left(steps, step)
        return place < len(steps) and steps[place] == step

    def _steps_where(self, condition: str) -> dict[int, list[int]]:
        # As lists, because of millions of steps each row would be a tuple.
        query = f"""
            SELECT rank, list_sort(list(step)) FROM (SELECT DISTINCT rank, step FROM records WHERE {condition})
            GROUP BY rank ORDER BY rank"""
        return dict(self._fetch(query))

    def that_matter(self, roots: Collection[str]) -> list[Record]:
        """Return the records that the incident rules need."""
        found = self._records(_THAT_MATTER, [list(roots)])
        # Asked first, because few runs have one, and that a word never occurs in a column is seen at once.
        if self._fetch("SELECT 1 FROM boundaries WHERE tensor = 'loss_scale' LIMIT 1"):
            found += self._records(_LOW_LOSS_SCALES)
        return found

    def first_of_step(self, row: Record) -> int:
        """Return the number of the first record in a record's step."""
        query = "SELECT min(seq) FROM boundaries WHERE rank = ? AND step = ?"
        return int(self._fetch(query, [row.rank, row.step])[0][0])

    def scene(self, last: Record) -> list[Record]:
        """Return the passes of a step from the first with a non-finite value to the one of ``last``.

        Parameters and buffers that are finite are left out: no rule asks for them, and there may be a million.
        """
        query = f"""
            SELECT {_COLUMNS} FROM boundaries
            WHERE rank = ? AND step = ? AND micro_step <= ? AND phase <> 'event' AND tensor <> 'grad_norm'
            AND ({_BAD} OR NOT {_STATE})
            AND micro_step >= (
                SELECT min(micro_step) FROM bad_records WHERE rank = ? AND step = ? AND seq <= ?
                AND NOT (phase = 'input' AND {_STATE})
            )
            ORDER BY seq"""
        where = [last.rank, last.step]
        return self._records(query, [*where, last.micro_step, *where, last.seq])

    def bad_state_before(self, first: Record) -> list[Record]:
        """Return the latest records before ``first`` of the parameters and buffers non-finite then."""
        rank, seq = first.rank, first.seq
        query = f"""
            WITH suspects AS (
                SELECT DISTINCT module, tensor, path FROM bad_records
                WHERE rank = ? AND seq < ? AND {_STATE}
            ),
            latest AS (
                SELECT boundaries.* FROM boundaries SEMI JOIN suspects
                ON boundaries.module IS NOT DISTINCT FROM suspects.module AND boundaries.tensor = suspects.tensor
                AND boundaries.path = suspects.path
                WHERE rank = ? AND seq < ?
                QUALIFY row_number() OVER (PARTITION BY module, tensor, path ORDER BY seq DESC) = 1
            )
            SELECT {_COLUMNS} FROM latest WHERE {_BAD} ORDER BY seq"""
        found = self._records(query, [rank, seq, rank, seq])
        return [row for row in found if not self._was_watched_between(rank, row.step, first.step)]

    def start_of(self, state: Record) -> Record:
        """Return the record with which a parameter or buffer went non-finite for good before ``state``."""
        key = [state.rank, state.seq, state.module, state.tensor, state.path]
        query = f"""
            SELECT step, seq FROM boundaries WHERE rank = ? AND seq <= ? AND {_KEY} AND {_BAD} AND seq > (
                SELECT coalesce(max(seq), -1) FROM boundaries
                WHERE rank = ? AND seq <= ? AND {_KEY} AND NOT {_BAD}
            ) ORDER BY seq DESC"""
        later, start = state.step, state.seq
        for step, seq in self._fetch(query, [*key, *key]):
            if self._was_watched_between(state.rank, step, later):
                break
            later, start = step, seq
        return self._records(f"SELECT {_COLUMNS} FROM boundaries WHERE rank = ? AND seq = ?", [state.rank, start])[0]

    def _was_watched_between(self, rank: int, first: int, last: int) -> bool:
        """Whether a watched step lies between two others: what is non-finite then has a row in it, the rest has none.

        A step that GradScaler skipped says nothing, it has not changed anything.
        """
        steps = self._watched_updates(rank)
        place = bisect_right(steps, first)
        return place < len(steps) and steps[place] < last

    def _watched_updates(self, rank: int) -> list[int]:
        if rank not in self._updates:
            skipped = {step for of, step in self.skipped_steps() if of == rank}
            self._updates[rank] = [step for step in self.watched_steps.get(rank, []) if step not in skipped]
        return self._updates[rank]

    def bad_in_healthy_steps(self, rank: int, before: int, unhealthy: Collection[int]) -> list[tuple[Record, int]]:
        """Return the first record of each boundary that was non-finite in healthy steps, and in how many.

        Boundaries whose records held different kinds (NaN, Inf, -Inf) come once for each mixture.
        """
        query = f"""
            WITH firsts AS (
                SELECT min(seq) AS seq, count(DISTINCT step) AS steps
                FROM bad_records
                WHERE rank = ? AND step < ? AND NOT list_contains(?, step)
                AND tensor NOT IN {_SCALARS}
                GROUP BY module, tensor, path, nan_count > 0, posinf_count > 0, neginf_count > 0
            )
            SELECT {_COLUMNS}, steps FROM bad_records JOIN firsts USING (seq) WHERE rank = ? ORDER BY seq"""
        rows = self._fetch(query, [rank, before, list(unhealthy), rank])
        return [(Record._make(row[:-1]), row[-1]) for row in rows]

    def same_tensor_before(self, row: Record) -> Record | None:
        """Return the latest earlier output or buffer that looks like the very same tensor."""
        values = (row.shape, row.nan_count, row.posinf_count, row.neginf_count, row.min, row.max, row.norm)
        query = f"""
            SELECT {_COLUMNS} FROM bad_records
            WHERE rank = ? AND seq < ? AND tensor IN ('output', 'buffer') AND dtype = ?
            AND shape = ? AND nan_count = ? AND posinf_count = ? AND neginf_count = ?
            AND "min" IS NOT DISTINCT FROM ? AND "max" IS NOT DISTINCT FROM ?
            AND norm IS NOT DISTINCT FROM ?
            ORDER BY seq DESC LIMIT 1"""
        found = self._records(query, [row.rank, row.seq, row.dtype, *values])
        return found[0] if found else None

    def first_overflow(self, rank: int, step: int) -> Record | None:
        """Return a step's first non-finite gradient or loss; without one its loss scale."""
        query = f"""
            SELECT {_COLUMNS} FROM boundaries WHERE rank = ? AND step = ?
            AND ((tensor IN ('grad', 'loss') AND {_BAD}) OR tensor = 'loss_scale')
            ORDER BY tensor = 'loss_scale', seq LIMIT 1"""
        found = self._records(query, [rank, step])
        return found[0] if found else None

    def loss_scales(self, rank: int, first: int, last: int) -> list[tuple[int, float | None]]:
        """Return step and loss scale of the steps from ``first`` to ``last``; None is one that is not finite."""
        query = """
            SELECT step, "max" FROM boundaries
            WHERE tensor = 'loss_scale' AND rank = ? AND step BETWEEN ? AND ? ORDER BY seq"""
        return self._fetch(query, [rank, first, last])

    def context(self, row: Record, count: int) -> list[Record]:
        """Return the ``count`` records before ``row``, oldest first."""
        query = f"""
            SELECT {_COLUMNS} FROM boundaries
            WHERE rank = ? AND seq < ? AND step BETWEEN ? AND ? AND phase <> 'event'
            ORDER BY seq DESC LIMIT ?"""
        return self._records(query, [row.rank, row.seq, row.step - 1, row.step, count])[::-1]

    def history(self, row: Record, steps: Sequence[int]) -> list[Record]:
        """Return the same boundary in each of ``steps``, oldest first: the same call's, else the last."""
        if not steps:
            return []
        query = f"""
            SELECT {_COLUMNS} FROM boundaries
            WHERE rank = ? AND step BETWEEN ? AND ? AND {_KEY} AND phase = ?
            ORDER BY seq"""
        key = [row.module, row.tensor, row.path, row.phase]
        found = self._records(query, [row.rank, min(steps), max(steps), *key])
        # Not in SQL: a window would make it read every row group.
        found.sort(key=lambda one: (one.call == row.call, one.micro_step == row.micro_step, one.seq))
        chosen = {record.step: record for record in found}
        return [chosen[step] for step in steps if step in chosen]

    def spread(self, rank: int, step: int) -> Spread:
        """Return how much of a step was non-finite."""
        count = "count(DISTINCT (module, path)) FILTER (WHERE tensor = '{}' {})"
        modules = "count(DISTINCT module) FILTER (WHERE tensor = 'output' {})"
        query = f"""
            SELECT {count.format("param", f"AND phase <> 'input' AND {_BAD}")},
                {count.format("grad", f"AND {_BAD}")}, {modules.format(f"AND {_BAD}")},
                {count.format("param", "")}, {count.format("grad", "")}
            FROM boundaries WHERE rank = ? AND step = ?"""
        spread = Spread(*self._fetch(query, [rank, step])[0])
        if not self.is_watched(rank, step):
            return spread
        # Finite ones leave no rows in a watched step.
        known = sum(len(module.parameters) for module in self._run.info.modules)
        return replace(spread, all_params=max(spread.all_params, known), all_grads=max(spread.all_grads, known))

    def rest_of_step(self, row: Record, roots: Collection[str]) -> list[Record]:
        """Return the step's losses, batches and root outputs after ``row``."""
        query = f"""
            SELECT {_COLUMNS} FROM boundaries WHERE rank = ? AND step = ? AND seq > ?
            AND (tensor = 'loss' OR phase = 'input' OR (tensor = 'output' AND list_contains(?, module)))
            ORDER BY seq"""
        return self._records(query, [row.rank, row.step, row.seq, list(roots)])

    def replay(self, rank: int, first: int, last: int) -> list[Record]:
        """Return what the replays of steps left: rows of phase ``replay``, and events ``replay``."""
        query = f"""
            SELECT {_COLUMNS} FROM records WHERE rank = ? AND step BETWEEN ? AND ?
            AND (phase = 'replay' OR (phase = 'event' AND tensor = 'replay'))
            ORDER BY seq"""
        return self._records(query, [rank, first, last])

    def _bad_records(self) -> str:
        """Return the query of all non-finite records, with a scan for each kind that the run has.

        DuckDB skips whole row groups for a comparison with one column, and for an OR of three it does not; but each
        scan is planned anew in every query, so none is for a kind that never was.
        """
        most = self._fetch(f"SELECT {', '.join(f'max({count})' for count in _COUNTS)} FROM records")[0]
        there = [count for count, largest in zip(_COUNTS, most, strict=True) if largest]
        scans = [
            " AND ".join([f"SELECT * FROM boundaries WHERE {count} > 0", *(f"{other} = 0" for other in there[:before])])
            for before, count in enumerate(there)
        ]
        return " UNION ALL ".join(scans) or "SELECT * FROM boundaries WHERE false"

    def _records(self, query: str, parameters: Sequence[Any] = ()) -> list[Record]:
        cursor = self._run.execute(query, parameters)
        found: list[Record] = []
        while some := cursor.fetchmany(_ROWS_AT_ONCE):  # millions of rows would be there twice
            found += map(Record._make, some)
        return found

    def _fetch(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._run.execute(query, parameters).fetchall()
