"""Several processes of one launch: one directory, one file for each rank, told apart by the environment alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture.tracing import read
from torch import nn

import gradtrace
from gradtrace.capture.launch import Launch
from gradtrace.capture.tracer import Tracer

TRAIN = """
import os, sys, torch
from torch import nn
from gradtrace.capture.tracer import Tracer

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Tracer(model, sys.argv[1]) as tracer:
    for step in range(2 + rank):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(10 * rank + step))).sum().backward()
        optimizer.step()
print(tracer.path)
"""

LAUNCH = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}


def start(path: Path, rank: int, **more: str) -> subprocess.Popen[str]:
    environment = {"PATH": "/usr/bin:/bin", **LAUNCH, "RANK": str(rank), **more}
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_rank_writes_a_file_of_its_own_into_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    processes = [start(path, rank) for rank in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert results == [(f"{path}\n", "")] * 2
    assert sorted(p.name for p in path.glob("*.parquet*")) == ["rank-0.parquet", "rank-1.parquet"]
    for rank in range(2):
        recorded = read(path / f"rank-{rank}.parquet")
        assert (recorded.info.rank, recorded.info.world_size, recorded.info.attempt) == (rank, 2, 0)
        assert {row["rank"] for row in recorded.rows} == {rank}
        assert recorded.columns("step", "max", tensor="input") == [(s, 10.0 * rank + s) for s in range(2 + rank)]
    run = gradtrace.open_run(path)
    counts = run.sql("select rank, count(*) from records where tensor = 'loss' group by 1 order by 1")
    assert counts.rows == [(0, 2), (1, 3)]
    assert len({read(path / f"rank-{rank}.parquet").info.run_id for rank in range(2)}) == 1


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Launch:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Launch.of_environment()


def test_a_single_process_is_rank_zero_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(monkeypatch) == Launch(rank=0, world_size=1, attempt=0, run_id=None)
    assert launch(monkeypatch, RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none").world_size == 1
    assert launch(monkeypatch, RANK="x", WORLD_SIZE="many") == Launch()


def test_ranks_of_one_launch_share_its_id_and_restarts_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    first = launch(monkeypatch, RANK="0", **LAUNCH)
    second = launch(monkeypatch, RANK="1", **LAUNCH)
    again = launch(monkeypatch, RANK="1", TORCHELASTIC_RESTART_COUNT="2", **LAUNCH)
    other = launch(monkeypatch, RANK="0", **{**LAUNCH, "TORCHELASTIC_RUN_ID": "other"})
    assert first.run_id == second.run_id == again.run_id is not None
    assert first.run_id != other.run_id
    assert (first.rank, second.rank, second.attempt, again.attempt) == (0, 1, 0, 2)


@pytest.mark.parametrize(
    ("rank", "size", "here"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ],
)
def test_mpirun_says_in_its_own_words_which_rank_it_is(
    rank: str, size: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {size: "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    launched = [launch(monkeypatch, **facts, **{rank: str(number), here: "4"}) for number in (0, 3)]
    assert [(one.rank, one.world_size) for one in launched] == [(0, 4), (3, 4)]
    assert launched[0].run_id == launched[1].run_id == f"127.0.0.1-4711-{os.getppid()}"
    # Spread over machines, they have different parents.
    assert launch(monkeypatch, **facts, **{rank: "3", here: "2"}).run_id == "127.0.0.1-4711"
    assert launch(monkeypatch, **{size: "1", rank: "0"}).world_size == 1


def test_a_restarted_rank_writes_beside_its_first_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.parquet"
    for attempt in range(2):
        launch(monkeypatch, RANK="1", TORCHELASTIC_RESTART_COUNT=str(attempt), **LAUNCH)
        model = nn.Linear(3, 1)
        with Tracer(model, path) as tracer:
            model(torch.ones(1, 3)).sum().backward()
        assert tracer.path == path
    assert sorted(p.name for p in path.glob("*.parquet*")) == ["rank-1.attempt-1.parquet", "rank-1.parquet"]
    assert read(path / "rank-1.attempt-1.parquet").info.attempt == 1
