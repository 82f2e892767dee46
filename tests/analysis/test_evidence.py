"""Evidence: what the verdict's queries fetch, against the same choice made in Python."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from gradtrace.analysis.evidence import Evidence
from gradtrace.analysis.run import open_run
from gradtrace.trace.schema import Record
from tests.analysis.rows import Rows
from tests.traces import write_run

COUNTS = ("nan_count", "posinf_count", "neginf_count")


def what_matters(path: Path) -> list[Record]:
    with open_run(path) as run:
        return Evidence(run).that_matter([""])


@pytest.mark.parametrize("kinds", [kinds for size in range(4) for kinds in combinations(COUNTS, size)])
def test_a_record_is_bad_once_whatever_mixture_it_holds_and_whatever_the_run_has_besides(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    rows = Rows()
    for counts in product((0, 2), repeat=len(kinds)):
        rows.add("forward", "layer", "output", **dict(zip(kinds, counts, strict=True)))
    bad = [row.seq for row in rows.records if row.nan_count or row.posinf_count or row.neginf_count]
    assert len(bad) == 2 ** len(kinds) - 1
    with open_run(write_run(tmp_path / "run.parquet", rows.records)) as run:
        Evidence(run)
        assert run.execute("SELECT seq FROM bad_records ORDER BY seq").fetchall() == [(seq,) for seq in bad]


def test_a_loss_scale_below_one_matters_though_nothing_else_is_wrong_and_no_step_was_skipped(tmp_path: Path) -> None:
    rows = Rows()
    for scale in (2.0, 1.0, 0.5, 0.25):
        rows.add("forward", "", "output")
        values = {"numel": 1, "min": scale, "max": scale, "norm": scale}
        rows.add("optimizer", None, "loss_scale", "0", **values)
        rows.step += 1
    found = what_matters(write_run(tmp_path / "run.parquet", rows.records))
    assert [(row.step, row.tensor, row.max) for row in found] == [(2, "loss_scale", 0.5), (3, "loss_scale", 0.25)]


def test_what_matters_is_there_beside_a_loss_scale(tmp_path: Path) -> None:
    rows = Rows()
    lost = rows.add("loss", None, "loss", "", numel=1, nan_count=1, min=None, max=None, norm=None)
    scale = rows.add("optimizer", None, "loss_scale", "0", numel=1, min=0.5, max=0.5, norm=0.5)
    rows.add("optimizer", None, "lr", "0.0", numel=1, min=0.1, max=0.1, norm=0.1)
    found = what_matters(write_run(tmp_path / "run.parquet", rows.records))
    assert sorted(found, key=lambda row: row.seq) == [lost, scale]
