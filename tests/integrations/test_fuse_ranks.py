"""The fuse with two ranks: all stop at the same place, or none does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from capture.replaying import confirmations, events

TRAIN = """
import datetime, os, sys, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gradtrace
from gradtrace.errors import GradtraceWarning

warnings.simplefilter("ignore", GradtraceWarning)
torch.set_num_threads(1)
folder, kind = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
)

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight * x).sqrt()

class Mean(nn.Module):
    def forward(self, y):
        return y.mean()

net = Root()
model = net if kind == "alone" else DistributedDataParallel(net)
criterion = Mean()
if kind == "hooked":
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    model.register_comm_hook(None, allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
options = {"replays": 0, "capsule_limit": 0} if kind == "bare" else {}
end = "went on"
try:
    with gradtrace.trace(None, f"{folder}/run.parquet", on_nonfinite="stop", **options):
        for step in range(4):
            optimizer.zero_grad()
            loss = criterion(model(torch.full((3,), 0.0 if (rank, step) == (0, 2) else 1.0)))
            loss.backward()
            dist.all_reduce(torch.ones(1))
            optimizer.step()
            dist.all_reduce(torch.ones(1))
except gradtrace.NonFiniteError as error:
    end = f"stopped at step {error.step}"
print(end, step, net.weight.isfinite().all().item())
dist.destroy_process_group()
"""


def train(folder: Path, kind: str) -> list[str]:
    """Return what each of two ranks has printed."""
    environment = {"PATH": "/usr/bin:/bin", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    environment["TORCHELASTIC_RUN_ID"] = "job"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(folder), kind],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return [stdout.strip() for stdout, _ in ended]


@pytest.mark.parametrize("kind", ["reduced", "bare"])
def test_where_gradients_are_reduced_all_ranks_stop_at_the_same_place(tmp_path: Path, kind: str) -> None:
    assert train(tmp_path, kind) == ["stopped at step 2 2 True"] * 2
    first, second = (tmp_path / "run.parquet" / f"rank-{rank}.parquet" for rank in range(2))
    stop = (2, "stop", "stopped before the optimizer's step, as asked")
    own = "step 2: gradients not finite; first non-finite: net, grad weight"
    others = "step 2: gradients not finite; another rank's came in when they were added up"
    words = {own, own.replace("net", "(root)")}
    incident, last = events(first)
    assert (incident[:2], incident[2] in words, last) == ((2, "incident"), True, stop)
    assert events(second) == [(2, "incident", others), stop]
    said = confirmations(first)
    assert [one.status for one in said] == (["not_replayed"] if kind == "bare" else ["reproduced"])
    assert confirmations(second) == []


@pytest.mark.parametrize(("kind", "finite"), [("alone", [False, True]), ("hooked", [False, False])])
def test_where_ranks_cannot_know_of_each_other_none_stops_and_none_hangs(
    tmp_path: Path, kind: str, finite: list[bool]
) -> None:
    assert train(tmp_path, kind) == [f"went on 3 {is_finite}" for is_finite in finite]
    words = events(tmp_path / "run.parquet" / "rank-0.parquet")
    assert [event[:2] for event in words] == [(2, "incident")]
