"""A run of several ranks, read by plain engines that know nothing of gradtrace."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow.compute as pc
import pyarrow.dataset
import pytest

from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import COLUMNS, Record
from gradtrace.trace.writer import RunWriter
from tests.traces import write_run

PAGE = (Path(__file__).parent.parent.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## DuckDB, Polars, Spark and other engines\n")[2].partition("\n## ")[0]
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)

RANKS, STEPS = 2, 3
WANTED = ["rank", "step", "norm", "nan_count"]

Row = tuple[Any, ...]
Read = Callable[[str], list[Row]]


def _norm(rank: int, step: int, attempt: int = 0) -> float:
    """The norm of a gradient: every rank, step and attempt has one of its own."""
    return 100.0 * attempt + 10.0 * rank + step


def _expected(rank: int, attempt: int = 0) -> list[Row]:
    return [(rank, step, _norm(rank, step, attempt), int((rank, step) == (1, 2))) for step in range(STEPS)]


BOTH = _expected(0) + _expected(1)


def _records(rank: int, attempt: int) -> list[Record]:
    """A gradient and an event in each step; the gradient of rank 1 has a NaN in step 2."""
    facts: dict[str, Any] = {"numel": 4, "dtype": "float32", "shape": "[4]", "posinf_count": 0, "neginf_count": 0}
    facts |= {"rank": rank, "phase": "backward", "tensor": "grad", "module": "head", "path": "weight"}
    found = []
    for _, step, norm, bad in _expected(rank, attempt):
        found.append(Record(seq=2 * step, step=step, norm=norm, nan_count=bad, **facts))
        found.append(Record(seq=2 * step + 1, step=step, rank=rank, phase="event", tensor="switch", detail="words"))
    return found


def _write(path: Path, rank: int, attempt: int = 0) -> Path:
    return write_run(path, _records(rank, attempt), rank=rank, world_size=RANKS, attempt=attempt)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run of two ranks."""
    (path,) = {_write(tmp_path / "run.parquet", rank) for rank in range(RANKS)}
    return path


def _duckdb(files: str) -> list[Row]:
    query = f"SELECT {', '.join(WANTED)} FROM '{files}' WHERE tensor = 'grad' ORDER BY norm"
    return duckdb.sql(query).fetchall()


def _polars(files: str) -> list[Row]:
    grads = polars.scan_parquet(files).filter(polars.col("tensor").cast(polars.String) == "grad")
    return grads.select(WANTED).sort("norm").collect().rows()


def _pandas(files: str) -> list[Row]:
    found = sorted(Path(files).parent.glob(Path(files).name))
    records = pandas.concat(pandas.read_parquet(file) for file in found)
    return _of_frame(records)


def _of_frame(records: pandas.DataFrame) -> list[Row]:
    grads = records[records["tensor"] == "grad"].sort_values("norm")
    return list(grads[WANTED].itertuples(index=False, name=None))


def _arrow(files: str) -> list[Row]:
    found = sorted(map(str, Path(files).parent.glob(Path(files).name)))
    return _of_dataset(pyarrow.dataset.dataset(found))


def _of_dataset(records: Any) -> list[Row]:
    table = records.to_table(filter=pc.field("tensor") == "grad").sort_by("norm")
    return [tuple(row[name] for name in WANTED) for row in table.to_pylist()]


ENGINES = pytest.mark.parametrize("read", [_duckdb, _polars, _pandas, _arrow], ids=lambda read: read.__name__[1:])


@ENGINES
def test_an_engine_reads_all_ranks_at_once(read: Read, run: Path) -> None:
    assert read(f"{run}/*.parquet") == BOTH


@ENGINES
def test_a_rank_that_is_still_recorded_is_not_matched(read: Read, run: Path) -> None:
    unfinished = RunWriter(run, RunInfo(run_id="test", rank=2, world_size=RANKS + 1))
    names = ["_launch.json", "rank-0.parquet", "rank-1.parquet", "rank-2.parquet.parts"]
    assert sorted(path.name for path in run.iterdir()) == names
    assert read(f"{run}/*.parquet") == BOTH
    unfinished.finish(RunInfo(run_id="test", rank=2, world_size=RANKS + 1, end="completed"))


@pytest.mark.parametrize(
    "read_directory",
    [lambda run: _of_frame(pandas.read_parquet(run)), lambda run: _of_dataset(pyarrow.dataset.dataset(run))],
    ids=["pandas", "arrow"],
)
def test_an_engine_that_takes_a_whole_directory_passes_over_what_is_no_data(
    read_directory: Callable[[str], list[Row]], run: Path
) -> None:
    """As others do: a name with a leading underscore is none of theirs."""
    assert read_directory(str(run)) == BOTH


@ENGINES
def test_attempts_are_chosen_by_their_names(read: Read, run: Path) -> None:
    """Both ranks were started again: the same steps are there twice, with other values."""
    for rank in range(RANKS):
        _write(run, rank, attempt=1)
    again = _expected(0, attempt=1) + _expected(1, attempt=1)
    assert read(f"{run}/*.parquet") == BOTH + again
    assert read(f"{run}/rank-*.attempt-1.parquet") == again
    assert read(f"{run}/rank-?.parquet") == BOTH  # of up to ten ranks


def test_with_many_ranks_the_first_attempt_is_what_has_none_in_its_name(run: Path) -> None:
    _write(run, 0, attempt=1)
    query = f"""SELECT {", ".join(WANTED)} FROM '{run}/*.parquet'
                WHERE filename NOT LIKE '%.attempt-%' AND tensor = 'grad' ORDER BY norm"""
    assert duckdb.sql(query).fetchall() == BOTH
    records = polars.scan_parquet(f"{run}/*.parquet", include_file_paths="of")
    first = records.filter(~polars.col("of").str.contains(".attempt-", literal=True), polars.col("norm").is_not_null())
    assert first.select(WANTED).sort("norm").collect().rows() == BOTH


def test_every_rank_has_the_same_columns_in_the_same_order(run: Path) -> None:
    columns = [column.name for column in COLUMNS]
    for file in run.glob("*.parquet"):
        assert pyarrow.dataset.dataset(file).schema.names == columns


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["duckdb", "polars", "pandas"])
def test_the_page_shows_how_to_read_all_ranks(snippet: str, run: Path) -> None:
    done = subprocess.run([sys.executable, "-c", snippet], cwd=run.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {float(number) for number in re.findall(r"\b\d+\.0\b", done.stdout)} == {row[2] for row in BOTH}
