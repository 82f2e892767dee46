"""Accelerate: its launcher with one process and with two, a plain loop, and processes that the script starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradtrace
from tests.integrations.running import SCRIPTS, run, verdict_on

SCRIPT = str(SCRIPTS / "accelerate_loop.py")
LAUNCH = (
    "-m",
    "accelerate.commands.launch",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
)


def launch(folder: Path, processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run ``accelerate launch *command`` with so many processes on the CPU."""
    several = ("--multi_gpu", "--main_process_port", "0") if processes > 1 else ("--cpu",)
    options = ("--num_processes", str(processes), *several)
    return run(*LAUNCH, *options, *command, cwd=folder)


def losses(printed: str, rank: int) -> list[float]:
    lines = [line.split() for line in printed.splitlines()]
    return [float(loss) for number, loss in lines if int(number) == rank]


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with gradtrace.open_run(folder / "run.parquet") as opened:
        return opened.sql(query).rows


@pytest.mark.parametrize("processes", [1, 2])
def test_a_plain_loop_is_recorded_as_it_is_launched(processes: int, tmp_path: Path) -> None:
    """48 examples in batches of 4, two batches a step, shared among the ranks."""
    native = launch(tmp_path, processes, SCRIPT)
    done = launch(tmp_path, processes, "-m", "gradtrace", "record", SCRIPT)
    assert sorted(done.stdout.splitlines()) == sorted(native.stdout.splitlines())
    written = {"rank-0.parquet", "rank-1.parquet", "_launch.json"}
    assert (tmp_path / "run.parquet").is_file() == (processes == 1)
    assert processes == 1 or {path.name for path in (tmp_path / "run.parquet").iterdir()} == written

    steps = 12 // 2 // processes
    expected = [(rank, step, 2) for rank in range(processes) for step in range(steps)]
    assert rows(tmp_path, "SELECT rank, step, micro_steps FROM steps ORDER BY ALL") == expected
    modules = {"", "normalize", "features", "features.0", "features.1", "head"}
    assert {name for (name,) in rows(tmp_path, "SELECT module FROM modules")} == modules
    for rank in range(processes):
        # Accelerate divides what it hands to backward by the number of batches in a step.
        recorded = rows(tmp_path, f"SELECT 2 * max FROM records WHERE tensor = 'loss' AND rank = {rank} ORDER BY seq")
        assert [loss for (loss,) in recorded] == pytest.approx(losses(native.stdout, rank), rel=1e-6)
    assert verdict_on(tmp_path)["found"] is False


def test_the_rank_with_a_row_of_zeros_is_named(tmp_path: Path) -> None:
    launch(tmp_path, 2, "-m", "gradtrace", "record", SCRIPT, "--bad-rank", "1")
    verdict = verdict_on(tmp_path)
    assert (verdict["rank"], verdict["step"], verdict["phase"]) == (1, 2, "forward")
    assert (verdict["module"], verdict["tensor"]) == ("normalize", "output")
    assert verdict["op"] == "aten.div"  # the data need no gradient, so there is no node


SPAWNS = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
import gradtrace

def train(rank, folder, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradtrace.trace(model, folder + "/run.parquet"):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(10 * rank + step))).sum().backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, sys.argv[1:], nprocs=2)
"""


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_processes_that_a_script_starts_itself_are_told_apart_by_their_process_group(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No RANK and no WORLD_SIZE says that they are two."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    address = f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{_free_port()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script), str(tmp_path), address], check=True, env=environment, timeout=120)
    names = sorted(path.name for path in (tmp_path / "run.parquet").glob("*.parquet*"))
    assert names == ["rank-0.parquet", "rank-1.parquet"]
    counts = "SELECT rank, count(*), max(max) FROM records WHERE tensor = 'input' GROUP BY rank ORDER BY rank"
    assert rows(tmp_path, counts) == [(0, 2, 1.0), (1, 3, 12.0)]


FOLLOWED = """
import os
import subprocess
import sys
import torch
import torch.distributed as dist
from torch import nn

rank = int(sys.argv[2]) if len(sys.argv) > 2 else 0
other = None if rank else subprocess.Popen([sys.executable, __file__, sys.argv[1], "1"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
if other:
    other.wait()
"""


def test_where_the_script_starts_the_other_ranks_itself_it_is_said_that_one_is_recorded(tmp_path: Path) -> None:
    """As Lightning does with several devices."""
    script = tmp_path / "followed.py"
    script.write_text(FOLLOWED)
    done = run("-m", "gradtrace", "record", str(script), f"file://{tmp_path}/store", cwd=tmp_path)
    said = "rank 0 alone of 2 is in this recording: the script started the others itself"
    assert done.stderr.count(said) == 1
    assert rows(tmp_path, "SELECT rank, step FROM steps ORDER BY ALL") == [(0, 0), (0, 1)]


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
