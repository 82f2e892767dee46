"""The cells of the heatmap: for each module, tensor and column the extremes of all records that fall into it.

SQL does the counting. What comes out of it is dense: a plane of numbers for each tensor and statistic, module by
module, column by column, as the bytes that the page unpacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradtrace.analysis.report.grid import Grid, Selection, grid_of
from gradtrace.analysis.report.packing import FULL, pack

if TYPE_CHECKING:
    import pyarrow as pa

    from gradtrace.analysis.recording import Recording

TENSORS = ("output", "input", "grad_output", "grad_input", "grad", "param", "buffer")
STATISTICS = ("norm", "min", "max")
COUNTS = ("nan", "inf")

MOST_CELLS = 1_200_000
"""Most cells of a page, over all tensors: of each a norm, a minimum and a maximum are kept, in a file of 14 MB."""

FINE_CELLS = 250_000
"""Up to so many cells the numbers keep all bits of a float32, above it 16 of its mantissa: four to five digits."""

MOST_ROWS_AT_ONCE = 4_000_000
"""Rows of a trace that one query goes through; a large trace is read stretch by stretch of its steps."""

_PAIRS_AT_THE_ENDS = """
SELECT count(*) FROM (
    SELECT DISTINCT {module}, tensor FROM {records}
    WHERE module IS NOT NULL AND tensor IN {tensors} AND {condition} AND step IN ({first}, {last})
)
"""

_TABLE = """
CREATE OR REPLACE TABLE report_cells (
    module VARCHAR, tensor VARCHAR, column_number INTEGER, norm DOUBLE, "min" DOUBLE, "max" DOUBLE,
    nan BIGINT, inf BIGINT, nan_records BIGINT, inf_records BIGINT
)
"""

_CELLS = """
INSERT INTO report_cells
SELECT
    {module} AS module, tensor, {column} AS column_number,
    max(norm) AS norm, min("min") AS "min", max("max") AS "max",
    max(nan_count) AS nan, max(posinf_count + neginf_count) AS inf,
    count(*) FILTER (WHERE nan_count > 0) AS nan_records,
    count(*) FILTER (WHERE posinf_count > 0 OR neginf_count > 0) AS inf_records
FROM {records}
WHERE module IS NOT NULL AND tensor IN {tensors} AND phase <> 'event' AND {condition}
    AND step >= {first} AND step < {end}
GROUP BY ALL
"""

_COARSER = """
CREATE OR REPLACE TABLE report_cells AS
SELECT
    module, tensor, (column_number // {factor})::INTEGER AS column_number,
    max(norm) AS norm, min("min") AS "min", max("max") AS "max", max(nan) AS nan, max(inf) AS inf,
    sum(nan_records) AS nan_records, sum(inf_records) AS inf_records
FROM report_cells
GROUP BY ALL
"""

_DENSE = """
SELECT cells.norm, cells."min", cells."max", cells.nan, cells.inf
FROM (
    SELECT unnest($modules::VARCHAR[]) AS module, unnest($numbers::INTEGER[]) AS number
) AS rows
CROSS JOIN range($columns) AS columns(column_number)
LEFT JOIN (FROM report_cells WHERE tensor = $tensor) AS cells
    ON cells.module = rows.module AND cells.column_number = columns.column_number
ORDER BY number, columns.column_number
"""


@dataclass
class Planes:
    """One tensor: the numbers of the modules that have it, and for each statistic a packed plane of ``count`` cells."""

    modules: list[int]
    count: int
    packed: dict[str, str] = field(default_factory=dict)


def grid_with_room(run: Recording, selection: Selection) -> Grid:
    """Return as many columns as there is room for, by what the first and the last step hold.

    Raises:
        NoMatchError: the run has records, and none that was selected.
    """
    grid = grid_of(run, selection)
    at_ends = {"tensors": TENSORS, "condition": selection.condition, "first": grid.first, "last": grid.last}
    pairs = run.execute(_PAIRS_AT_THE_ENDS.format(**at_ends, **selection.places)).fetchall()[0][0]
    if pairs * grid.count <= MOST_CELLS:
        return grid
    return grid_of(run, selection, max(1, MOST_CELLS // pairs))


def count_cells(run: Recording, selection: Selection, grid: Grid, progress: Callable[[float], None]) -> Grid:
    """Put the cells into the table ``report_cells``; return the grid, made coarser where they would be too many.

    ``progress`` is told the share that is done.
    """
    run.execute(_TABLE)
    rows = sum(info.records for info in run.infos)
    at_once = max(1, min(grid.count, grid.count * MOST_ROWS_AT_ONCE // max(rows, 1)))
    for column in range(0, grid.count, at_once):
        first, end = (grid.first + edge * grid.width for edge in (column, column + at_once))
        part = {"column": grid.column, "condition": selection.condition, "first": first, "end": end}
        run.execute(_CELLS.format(tensors=TENSORS, **part, **selection.places))
        progress(min(1.0, (column + at_once) / grid.count))
    pairs = run.execute("SELECT count(*) FROM (SELECT DISTINCT module, tensor FROM report_cells)").fetchall()[0][0]
    factor = -(-pairs * grid.count // MOST_CELLS)
    if factor <= 1:
        return grid
    run.execute(_COARSER.format(factor=factor))
    return grid.coarser(factor)


def planes(run: Recording, grid: Grid, numbers: dict[str, int]) -> dict[str, Planes]:
    """Return the planes of each tensor that was recorded; ``numbers`` gives each module's place in the page's list."""
    pairs = run.execute("SELECT DISTINCT tensor, module FROM report_cells").fetchall()
    kept = kept_bytes(len(pairs) * grid.count)
    found = {}
    for tensor in TENSORS:
        names = sorted((module for of, module in pairs if of == tensor), key=numbers.__getitem__)
        if names:
            found[tensor] = _planes(run, tensor, {name: numbers[name] for name in names}, grid, kept)
    return found


def kept_bytes(cells: int) -> int:
    """Return how many of the four bytes of each number there is room for."""
    return FULL if cells <= FINE_CELLS else FULL - 1


def _planes(run: Recording, tensor: str, numbers: dict[str, int], grid: Grid, kept: int) -> Planes:
    parameters: dict[str, Any] = {
        "modules": list(numbers), "numbers": list(numbers.values()), "columns": grid.count, "tensor": tensor,
    }  # fmt: skip
    table: pa.Table = run.connection.cursor().sql(_DENSE, params=parameters).to_arrow_table()
    of_tensor = Planes(list(numbers.values()), table.num_rows)
    for name in STATISTICS:
        of_tensor.packed[name] = pack(table[name], kept)
    for name in COUNTS:
        of_tensor.packed[name] = pack(table[name], FULL)
    return of_tensor
