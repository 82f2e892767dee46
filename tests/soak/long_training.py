"""A training of any length that is recorded and looks at itself meanwhile; run in a process of its own.

The garbage collector is off from the start to the end. What is measured goes to ``measured.json`` in the folder that is
given, and the losses as the script has seen them, 8 bytes each, to ``losses.bin``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import torch
from torch import Tensor, nn

import gradtrace
from benchmarks.growth import WIDTH, nested
from tests.live_objects import live, of_interest

SAMPLES = 100
LOOKS = 20_000
"""So many times at most, and once a step at most, it is looked how fast the machine is at the moment."""


def training_of(model: str, steps: int) -> tuple[nn.Module, Callable[[bool], float]]:
    """Return a model and what takes one step of its training and returns the loss; true is for a bad batch."""
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    network = small if model == "small" else nested(2000, 5)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 0.9 * (1 - step / steps))

    def step(is_bad: bool) -> float:
        batch = torch.randn(8, WIDTH)
        if is_bad:
            batch[0, 0] = math.nan
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(batch), batch.sin())
        loss.backward()
        value = float(loss.detach())
        if not math.isfinite(value):
            for parameter in network.parameters():
                if isinstance(parameter.grad, Tensor):
                    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        schedule.step()
        return value

    return network, step


def speed_of_machine() -> float:
    """Return the seconds of some work of a training's kind that nobody records: no module, no graph, no optimizer."""
    left, right = torch.ones(8, 16), torch.ones(16, 16)
    start = time.perf_counter()
    for _ in range(10):
        torch.tanh(left @ right).sum().item()
    return time.perf_counter() - start


def bytes_in(path: Path) -> int:
    """Return how much there is in a folder or file at the moment; what is about to go counts if it is seen."""
    files = list(path.iterdir()) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.exists())


def looked_at(run: Path) -> dict[str, Any]:
    """Return what the process and its recording take at the moment."""
    parts = run.with_name(f"{run.name}.parts")
    return {
        "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "disk": bytes_in(parts) if parts.exists() else bytes_in(run),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "blocks": sys.getallocatedblocks(),
        "arrow": pyarrow.total_allocated_bytes(),
        "live": live(),
    }


def train(folder: Path, model: str, steps: int, bad: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train and return what was measured."""
    run = folder / "run.parquet"
    network, step = training_of(model, steps)
    between = max(steps // LOOKS, 1)
    times, losses, machine = (array("d", bytes(8 * count)) for count in (steps, steps, -(-steps // between)))
    samples: list[dict[str, Any]] = []
    every = max(steps // SAMPLES, 1)
    before = {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    with gradtrace.trace(network, run, **options):
        for number in range(steps):
            start = time.perf_counter()
            losses[number] = step(number == bad)
            times[number] = time.perf_counter() - start
            if number % between == 0:
                machine[number // between] = speed_of_machine()
            if (number + 1) % every == 0:
                samples.append({"step": number + 1, **looked_at(run)})
    after = {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    (folder / "losses.bin").write_bytes(losses.tobytes())
    ends = {"before": before, "after": after, "file": run.stat().st_size}
    return {"samples": samples, "times": list(times), "machine": list(machine), "garbage": garbage(), **ends}


def garbage() -> dict[str, Any]:
    """Return what only the garbage collector would have taken away: how much, and what of it is gradtrace's."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    count = gc.collect()
    own = of_interest(gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    return {"objects": count, "own": own}


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", choices=("small", "large"))
    parser.add_argument("steps", type=int)
    parser.add_argument("bad", type=int)
    parser.add_argument("options", type=json.loads)
    args = parser.parse_args()
    torch.set_num_threads(1)
    training_of("small", 1)[1](False)  # what torch loads with the first step leaves garbage of its own
    gc.collect()
    gc.disable()
    measured = train(args.folder, args.model, args.steps, args.bad, args.options)
    (args.folder / "measured.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
