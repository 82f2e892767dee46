"""Rows of single operations lie among those of boundaries, and no rule, summary or view of steps may count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtrace.analysis.run import Run
from gradtrace.analysis.summary import by_module, by_step, by_type
from gradtrace.analysis.verdict import first_nan
from gradtrace.trace.schema import Record
from tests.analysis.rows import INF, NAN, NEGINF, PARAMS, Rows, backward, forward, healthy, open_rows, update

_SPACE = 10
"""So far apart are the boundaries' rows: between them there is room for those of operations."""


def _recorded() -> Rows:
    """Three healthy steps, of which one holds a mask, and a failing one."""
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, 1)
    forward(rows, act=NEGINF, fc2_in=NEGINF)
    backward(rows)
    update(rows)
    rows.step += 1
    healthy(rows, 1)
    forward(rows)
    backward(rows, act_in=NAN, fc1=NAN, fc1_grad=NAN)
    update(rows, fc1=NAN)
    rows.records = [row._replace(seq=row.seq * _SPACE) for row in rows.records]
    return rows


def _operation(boundary: Record, seq: int, **values: Any) -> Record:
    """Return the row of an operation that looks like a boundary's, is far larger, and holds everything bad."""
    bad = NAN | INF | NEGINF | {"min": -1e30, "max": 1e30, "norm": 1e30}
    return boundary._replace(seq=seq, op="DivBackward0", file="net.py", line=7, **(bad | values))


def _with_operations(rows: Rows) -> Rows:
    """Put rows of operations and of a replay after every boundary's row."""
    more = []
    for row in rows.records:
        more += [
            row,
            _operation(row, row.seq + 1, tensor="grad_input" if row.phase == "backward" else "output"),
            _operation(row, row.seq + 2, phase="replay", tensor="input"),
            _operation(row, row.seq + 3, phase="replay", tensor="output", detail="{}"),
        ]
    rows.records = more
    return rows


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    with (
        open_rows(tmp_path / "plain", _recorded()) as plain,
        open_rows(tmp_path / "detailed", _with_operations(_recorded())) as detailed,
    ):
        yield plain, detailed


def test_the_verdict_is_that_of_the_boundaries(runs: tuple[Run, Run]) -> None:
    plain, detailed = (first_nan(run, context=50).to_dict() for run in runs)
    assert detailed["run"].pop("path") != plain["run"].pop("path")
    assert detailed.pop("confirmation") != plain.pop("confirmation")  # here the rows of phase replay do count
    assert (plain["step"], plain["module"], plain["tensor"]) == (3, "act", "grad_input")
    assert [row["fate"] for row in plain["contained"]] == ["contained", "contained"]
    assert detailed == plain


def test_a_healthy_run_stays_one(tmp_path: Path) -> None:
    rows = _recorded()
    rows.records = [row for row in rows.records if row.step < 3]
    with open_rows(tmp_path, _with_operations(rows)) as run:
        assert not first_nan(run).found


def test_summaries_are_those_of_the_boundaries(runs: tuple[Run, Run]) -> None:
    plain, detailed = runs
    for lines in (by_module, by_type, by_step):
        assert repr(lines(detailed)) == repr(lines(plain))  # as text, because NaN is not equal to itself
    assert max(line.max_output or 0.0 for line in by_module(plain)) < 1e30


@pytest.mark.parametrize("view", ["steps", "params", "grads"])
def test_views_are_those_of_the_boundaries(runs: tuple[Run, Run], view: str) -> None:
    plain, detailed = (run.sql(f"SELECT * FROM {view}").rows for run in runs)
    assert plain and repr(detailed) == repr(plain)


def test_queries_see_them(runs: tuple[Run, Run]) -> None:
    plain, detailed = (run.sql("SELECT count(*) FROM records").rows[0][0] for run in runs)
    assert detailed == 4 * plain
    assert runs[1].sql("SELECT count(*) FROM records WHERE op IS NULL").rows == [(plain,)]
