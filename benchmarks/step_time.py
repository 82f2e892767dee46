"""How much longer a training step takes while it is recorded, on resnet18 and GPT-2.

    python -m benchmarks.step_time --pairs 7

Blocks of plain and recorded steps take turns in one process; a ratio is that of two neighbouring blocks, so a
machine that slows down meanwhile slows both. Needs torchvision and transformers.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import gradtrace

Step = Callable[[], None]


class Result(NamedTuple):
    """Milliseconds a step, their ratio with the smallest and the largest, that of CPU time, what was written."""

    plain: float
    recorded: float
    ratio: float
    lowest: float
    highest: float
    cpu: float
    records: float
    bytes: float


def resnet18(batch: int, side: int) -> tuple[nn.Module, Step]:
    """Return torchvision's resnet18 and one step of its training on random images."""
    from torchvision.models import resnet18 as make

    model = make(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return model, step


def gpt2(batch: int, length: int, width: int, depth: int) -> tuple[nn.Module, Step]:
    """Return a GPT-2 built from a config and one step of its training on random tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    heads = max(2, width // 64)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=1000, n_positions=length, n_embd=width, n_layer=depth, n_head=heads, **special)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(1000, (batch, length))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return model, step


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "resnet18, 4 images of 64 x 64": lambda: resnet18(4, 64),
    "resnet18, 8 images of 224 x 224": lambda: resnet18(8, 224),
    "GPT-2, 2 layers of 32, 2 x 16 tokens": lambda: gpt2(2, 16, 32, 2),
    "GPT-2, 6 layers of 256, 8 x 128 tokens": lambda: gpt2(8, 128, 256, 6),
}


class Block(NamedTuple):
    """The median wall time and the mean CPU time of all threads, of a step in milliseconds."""

    wall: float
    cpu: float


def time_steps(step: Step, count: int) -> Block:
    """Time ``count`` steps, after one that is not timed."""
    step()
    times = []
    cpu = time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return Block(statistics.median(times), 1000 * (time.process_time() - cpu) / count)


def compare(make: Callable[[], tuple[nn.Module, Step]], pairs: int, count: int, folder: Path) -> Result:
    """Measure pairs of blocks of steps, plain and recorded in turn."""
    torch.manual_seed(0)
    model, step = make()
    path = folder / "run.parquet"
    plain: list[Block] = []
    recorded: list[Block] = []
    for pair in range(pairs + 1):
        plain.append(time_steps(step, count))
        with gradtrace.trace(model, path, overwrite=True):
            recorded.append(time_steps(step, count))
        if pair == 0:  # caches fill, libraries load
            plain.clear()
            recorded.clear()
    ratios = [mine.wall / theirs.wall for mine, theirs in zip(recorded, plain, strict=True)]
    cpu = [mine.cpu / theirs.cpu for mine, theirs in zip(recorded, plain, strict=True)]
    with gradtrace.open_run(path) as run:
        info = run.info
    return Result(
        statistics.median(block.wall for block in plain),
        statistics.median(block.wall for block in recorded),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(cpu),
        info.records / info.steps,
        path.stat().st_size / info.records,
    )


def main() -> None:
    """Measure every model and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a block")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--model", default="", help="only models whose name holds this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    print(f"{platform.machine()}, {cores}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| model | plain | recorded | ratio | lowest to highest | CPU time | records a step | bytes a record |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        if args.model not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            it = compare(make, args.pairs, args.steps, Path(folder))
        print(
            f"| {name} | {it.plain:.1f} ms | {it.recorded:.1f} ms | {it.ratio:.2f}x "
            f"| {it.lowest:.2f} to {it.highest:.2f} | {it.cpu:.2f}x | {it.records:.0f} | {it.bytes:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
