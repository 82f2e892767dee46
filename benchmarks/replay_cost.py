"""What keeping each root call for a replay costs in steps without an incident.

    python -m benchmarks.replay_cost --pairs 15

Blocks of steps recorded with and without it take turns in one process; a ratio is that of two neighbouring blocks.
A block counts with its fastest step, in processor time of all threads: what else the machine does only adds to it. The
control compares the recording without it with itself: what differs there is the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gradtrace

Step = Callable[[], None]


def _training(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[nn.Module, Step]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return model, step


def mlp() -> tuple[nn.Module, Step]:
    """Return a deep MLP, where each boundary is cheap, and a step of its training."""
    layers = [layer for _ in range(50) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return _training(nn.Sequential(*layers), torch.randn(64, 256), torch.randint(256, (64,)))


def cnn() -> tuple[nn.Module, Step]:
    """Return a small CNN with buffers and a step of its training."""
    blocks = [
        layer
        for width, wider in ((3, 16), (16, 32))
        for layer in (nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 8 * 8, 10))
    return _training(model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


class GPT(nn.Module):
    """A decoder of torch's own layers."""

    def __init__(self, depth: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch * length, vocabulary] of tokens [batch, length]."""
        states = self.tokens(tokens) + self.positions
        for layer in self.layers:
            states = layer(states, src_mask=self.mask)
        logits: torch.Tensor = self.head(states).flatten(0, 1)
        return logits


def gpt() -> tuple[nn.Module, Step]:
    """Return a GPT of 6 layers of 256 and a step of its training on 8 x 128 tokens."""
    tokens = torch.randint(1000, (8, 128))
    return _training(GPT(6, 256, 128, 1000), tokens, tokens.flatten())


MODELS = {"MLP, 50 x (256 + ReLU)": (mlp, 15), "CNN, 64 x 3 x 32 x 32": (cnn, 15), "GPT, 6 layers of 256": (gpt, 2)}
KEEPING = {"replays": 3}
NOT_KEEPING = {"replays": 0, "capsule_limit": 0}


def block(make_step: tuple[nn.Module, Step], steps: int, path: Path, **options: int) -> float:
    """Return the smallest processor time of a recorded step in milliseconds; the first is not timed."""
    model, step = make_step
    times = []
    with gradtrace.trace(model, path, overwrite=True, **options):  # type: ignore[arg-type]
        for number in range(steps + 1):
            start = time.process_time()
            step()
            if number > 0:
                times.append(1000 * (time.process_time() - start))
    return min(times)


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Return the bounds that hold the median in 95 of 100 resamplings."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws * 25 // 1000], medians[draws * 975 // 1000]


def compare(name: str, pairs: int) -> None:
    """Measure one model and print its lines of the table."""
    make, steps = MODELS[name]
    torch.manual_seed(0)
    made = make()
    kept: list[float] = []
    control: list[float] = []
    extra: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.parquet"
        block(made, steps, path, **KEEPING)  # caches fill, libraries load
        for pair in range(pairs):
            first = block(made, steps, path, **NOT_KEEPING)
            with_it = block(made, steps, path, **KEEPING)
            again = block(made, steps, path, **NOT_KEEPING)
            kept.append(with_it / (first if pair % 2 else again))
            control.append(again / first)
            extra.append(with_it - (first + again) / 2)
    for what, ratios in (("kept / not kept", kept), ("control", control)):
        low, high = interval(ratios)
        print(f"| {name} | {what} | {statistics.median(ratios):.4f} | {low:.4f} to {high:.4f} |", flush=True)
    low, high = interval(extra)
    median = statistics.median(extra)
    print(f"| {name} | ms a step more | {median:.3f} | {low:.3f} to {high:.3f} |", flush=True)


def main() -> None:
    """Measure every model and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks")
    parser.add_argument("--model", default="", help="only models whose name holds this")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.pairs} pairs\n")
    print("| model | what | median | 95 % interval |")
    print("|---|---|---|---|")
    for name in MODELS:
        if args.model in name:
            compare(name, args.pairs)


if __name__ == "__main__":
    main()
