"""How much more memory a training takes while it is recorded: a language model with a large vocabulary.

    python -m benchmarks.memory

The loss is computed outside of the model from logits of 100 MB, so anything that is held for longer than the
training holds it shows at once. Each run is a process of its own; plain and recorded ones take turns.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import gradtrace

VOCABULARY = 50_000
WIDTH = 64
BATCH, LENGTH = 4, 128
STEPS = 6


class Model(nn.Module):
    """The smallest that has logits: embedding, one layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, vocabulary] of tokens [batch, length]."""
        logits: torch.Tensor = self.head(self.layer(self.embedding(tokens)))
        return logits


def train(path: Path | None) -> None:
    """Train for some steps, recorded to ``path`` unless that is None."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tracer = None if path is None else gradtrace.trace(model, path).start()
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if tracer is not None:
        tracer.stop()


def peak_of_a_run(*arguments: str) -> float:
    """Return the largest resident size in MiB of a new process that trains."""
    command = [sys.executable, "-m", "benchmarks.memory", "--run", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak() -> float:
    """Return this process's largest resident size so far in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main() -> None:
    """Measure and print a table in Markdown; with ``--run`` train in this process and print its peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="processes of each kind")
    parser.add_argument("--run", nargs="?", const="", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        train(Path(args.run) if args.run else None)
        print(peak())
        return
    plain, recorded = [], []
    for _ in range(args.repeat):
        plain.append(peak_of_a_run())
        with tempfile.TemporaryDirectory() as folder:
            recorded.append(peak_of_a_run(str(Path(folder) / "run.parquet")))
    logits = BATCH * LENGTH * VOCABULARY * 4 / 2**20
    print(f"logits of {logits:.0f} MiB, torch {torch.__version__}, {args.repeat} processes each\n")
    print("| | median | lowest | highest |")
    print("|---|---|---|---|")
    for name, peaks in (("plain", plain), ("recorded", recorded)):
        print(f"| {name} | {statistics.median(peaks):.0f} MiB | {min(peaks):.0f} MiB | {max(peaks):.0f} MiB |")
    print(f"\nrecorded / plain: {statistics.median(recorded) / statistics.median(plain):.3f}")


if __name__ == "__main__":
    main()
