"""How much longer a training step takes while it is recorded, on resnet18 and GPT-2.

    python -m benchmarks.step_time --pairs 7

The first two are the scripts of the integration tests as they are, the others the same scripts in other sizes; a toy
is one whose operations are so small that fixed costs are most. Blocks of plain and recorded steps take turns in one
process; a ratio is that of two neighbouring blocks, so a machine that slows down meanwhile slows both. Needs
torchvision and transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

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


def of_script(name: str, *sizes: str) -> tuple[nn.Module, Step]:
    """Return the model of a script of the integration tests and one step of its training.

    ``sizes`` are options of the script; without them it is the size that the tests have.
    """
    spec = importlib.util.spec_from_file_location(Path(name).stem, SCRIPTS / name)
    if spec is None or spec.loader is None:
        raise SystemExit(f"no such script: {name}")
    script = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "argv", [name, "--steps", "0", *sizes]):
        spec.loader.exec_module(script)
    return script.model, script.step


SCRIPTS = Path(__file__).parents[1] / "tests" / "integrations" / "scripts"
_STABLE = "--lr 0.001"  # more steps than the tests have, and an incident would be measured too
_TOY_GPT2 = "--batch 2 --length 16 --longest-prompt 12 --width 32 --layers 2 --vocabulary 1000"
_LARGE_GPT2 = "--batch 8 --length 128 --longest-prompt 96 --width 256 --layers 6 --vocabulary 1000"
MODELS: dict[str, tuple[str, str]] = {
    "resnet18, 8 images of 112 x 112": ("resnet18.py", _STABLE),
    "GPT-2, 4 layers of 192, 4 x 64 tokens": ("gpt2.py", ""),
    "resnet18, 8 images of 224 x 224": ("resnet18.py", f"--side 224 {_STABLE}"),
    "GPT-2, 6 layers of 256, 8 x 128 tokens": ("gpt2.py", _LARGE_GPT2),
    "toy: resnet18, 4 images of 64 x 64": ("resnet18.py", f"--batch 4 --side 64 {_STABLE}"),
    "toy: GPT-2, 2 layers of 32, 2 x 16 tokens": ("gpt2.py", _TOY_GPT2),
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


def compare(script: str, sizes: str, pairs: int, count: int, folder: Path) -> Result:
    """Measure pairs of blocks of steps, plain and recorded in turn."""
    model, step = of_script(script, *sizes.split())
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
    for name, (script, sizes) in MODELS.items():
        if args.model not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            it = compare(script, sizes, args.pairs, args.steps, Path(folder))
        print(
            f"| {name} | {it.plain:.1f} ms | {it.recorded:.1f} ms | {it.ratio:.2f}x "
            f"| {it.lowest:.2f} to {it.highest:.2f} | {it.cpu:.2f}x | {it.records:.0f} | {it.bytes:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
