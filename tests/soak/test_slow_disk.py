"""A disk that is slower than the training, for real: each write takes its time by the number of bytes.

Two recordings of the same training are made in turn, one on a disk of fifty megabytes a second and one on a disk so
slow that to write a step in full takes four times as long as to train it, on the machine as it is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradtrace

STEPS = 600
BAD_STEP = 550
FIRST = 200
"""The time is taken from this step on: that the disk is slow shows in the first seconds, and takes them."""
FEW_STEPS = 60
HEALTHY = 50e6
"""Bytes a second."""
TIMES = 4
ROUNDS = 3

TRAINING = """
    import hashlib, json, os, sys, time
    import torch
    from torch import nn
    from gradtrace.capture.slow_disk import SlowDisk
    from gradtrace.capture.tracer import Tracer

    path, rate, steps, bad, first, thins = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:])
    if not thins:
        SlowDisk.fitting = lambda self, step, rows, in_full: (rows, "full")
    write = os.write

    def throttled(fd, data):
        written = write(fd, data)
        if ".parts/" in os.readlink(f"/proc/self/fd/{fd}"):
            time.sleep(written / rate)
        return written

    def memory():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    os.write = throttled
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizes, begun = [], time.perf_counter()

    def train():
        global begun
        for step in range(steps):
            if step == first:
                begun = time.perf_counter()
            optimizer.zero_grad()
            batch = torch.randn(256, 64)
            if step == bad:
                batch[0, 0] = torch.nan
            loss = model(batch).square().mean()
            loss.backward()
            if step == bad:
                optimizer.zero_grad()  # the script skips the batch
            optimizer.step()
            if step % 50 == 0:
                sizes.append(memory())
        return time.perf_counter() - begun

    size = 0
    if path == "none":
        seconds = train()
    else:
        with Tracer(model, path, capsule_limit=0) as tracer:
            seconds = train()
            size = tracer.bytes_written
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps({"seconds": seconds, "weights": weights, "memory": sizes, "size": size}))
"""


def train(path: Path | str, rate: float, steps: int = STEPS, first: int = FIRST, thins: int = 1) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(TRAINING), str(path)]
    command += map(str, (rate, steps, BAD_STEP, first, thins))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def verdict(path: Path) -> dict[str, Any]:
    keys = ("found", "step", "phase", "module", "call", "tensor", "path", "kind", "nan_count", "numel", "reached")
    with gradtrace.open_run(path) as run:
        found = run.first_nan().to_dict()
    return {key: found[key] for key in keys}


def test_a_disk_slower_than_the_training_thins_steps_and_does_not_hold_it_up(
    tmp_path: Path, result: Callable[..., None]
) -> None:
    alone = train("none", 0)
    # A few steps that all are written in full, to know how slow is slow here, and what there is to win.
    few = train(tmp_path / "few.parquet", HEALTHY, FEW_STEPS, 10, 0)
    size = few["size"] / FEW_STEPS
    speed = size / (TIMES * few["seconds"] / (FEW_STEPS - 10))
    in_full = train(tmp_path / "full.parquet", speed, FEW_STEPS, 10, 0)
    unthinned = in_full["seconds"] / few["seconds"]
    ratios, runs = [], []
    for number in range(ROUNDS):
        healthy = train(tmp_path / f"healthy-{number}.parquet", HEALTHY)
        speed = size / (TIMES * healthy["seconds"] / (STEPS - FIRST))  # by the machine as it is now
        slow = train(tmp_path / f"slow-{number}.parquet", speed)
        assert healthy["weights"] == slow["weights"] == alone["weights"]
        ratios.append(slow["seconds"] / healthy["seconds"])
        runs.append((healthy, slow))
    counts = [_counted(tmp_path / f"slow-{number}.parquet") for number in range(ROUNDS)]
    for number in range(ROUNDS):
        healthy_path = tmp_path / f"healthy-{number}.parquet"
        with gradtrace.open_run(healthy_path) as run:
            assert run.info.paced == {}
        assert verdict(tmp_path / f"slow-{number}.parquet") == verdict(healthy_path)
        assert verdict(healthy_path)["step"] == BAD_STEP
    ratio = statistics.median(ratios)
    # Writing may take a third of the time, half as much again; the steps around the incident are written in full.
    assert ratio < 1.75
    assert unthinned > 1.5 * ratio
    memory = runs[-1][1]["memory"][: BAD_STEP // 50]  # what the incident loads of code is no growth
    growth = max(memory[len(memory) // 2 :]) - max(memory[: len(memory) // 2])
    assert growth < 8 * 2**20
    result(
        f"{STEPS:,} steps on a disk that takes {TIMES} times as long for a step in full as the training does",
        rounds=ROUNDS,
        steps_thinned=[thinned for thinned, _ in counts][-1],
        steps_in_full=[full for _, full in counts][-1],
        times_as_long=ratio,
        times_as_long_if_nothing_were_thinned=unthinned,
        growth_of_memory_in_the_second_half_MB=growth / 1e6,
        weights="bit for bit those of an unrecorded run",
        verdict_of_the_incident_at_step=BAD_STEP,
        series={"memory_MB": [size / 1e6 for size in memory]},
    )


def _counted(path: Path) -> tuple[int, int]:
    """Return how many steps were thinned, and how many not, by the rows that are there and by the run's own count."""
    with gradtrace.open_run(path) as run:
        query = "select step, count(*) filter (tensor = 'grad_input') from records group by step"
        rows = run.sql(query).rows
        thinned = [step for step, gradients in rows if not gradients]
        assert len(rows) == STEPS
        assert run.info.paced == {"first_step": min(thinned), "last_step": max(thinned), "steps": len(thinned)}
        assert run.info.captured == STEPS - len(thinned)
        assert BAD_STEP not in thinned
    return len(thinned), STEPS - len(thinned)
