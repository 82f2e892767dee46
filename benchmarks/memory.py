"""How much more memory a training takes while it is looked at: the largest resident size of a process of its own.

    python -m benchmarks.memory
    python -m benchmarks.memory --models logits --variants full --repeat 5

Besides the fixed models there is ``logits``: a language model with a large vocabulary, whose loss is computed outside
of the model from logits of 100 MB, so that anything that is held for longer than the training holds it shows at once.
A plain training loads torch alone; what a variant loads besides is part of what it takes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models
from benchmarks.machine import machine
from benchmarks.models import Training
from benchmarks.tables import table

VARIANTS = ("off", "detect_anomaly", "underflow_overflow", "naive", "full", "every10", "watch")
VOCABULARY, WIDTH, BATCH, LENGTH = 50_000, 64, 4, 128


class Tiny(nn.Module):
    """The smallest language model that has logits: embedding, one layer, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] of tokens [batch, length]."""
        logits: Tensor = self.head(self.layer(self.embedding(tokens)))
        return logits


def logits() -> Training:
    """Return the training of the tiny model, each step on tokens of its own."""
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)

    def loss() -> Tensor:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        result = model(tokens)
        return F.cross_entropy(result[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Training(model, optimizer, loss)


def make(name: str) -> Training:
    """Return one of the fixed models, or ``logits``."""
    return logits() if name == "logits" else models.make(name)


def train(model: str, variant: str, steps: int) -> None:
    """Train for some steps under a variant."""
    training = make(model)
    if variant == "off":
        for _ in range(steps):
            training.step()
        return
    from benchmarks.variants import VARIANTS, scratch

    with scratch() as folder, VARIANTS[variant](training, folder).watch():
        for _ in range(steps):
            training.step()


def peak() -> float:
    """Return this process's largest resident size so far in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def peak_of_a_run(model: str, variant: str, steps: int, threads: int) -> float | str:
    """Return the peak in MiB of a new process that trains, or the last line of what it says when it fails."""
    options = ["--steps", str(steps), "--threads", str(threads), "--run", model, variant]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
    return float(done.stdout)


def compare(model: str, variants: Sequence[str], steps: int, threads: int, repeat: int) -> list[list[str]]:
    """Return lines of the table for one model; processes of all variants take turns."""
    peaks: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(repeat):
        for variant in [*peaks]:
            found = peak_of_a_run(model, variant, steps, threads)
            if isinstance(found, str):
                print(f"{model}, {variant}: {found}", file=sys.stderr)
                del peaks[variant]
            else:
                peaks[variant].append(found)
    if "off" not in peaks:
        return []
    plain = statistics.median(peaks["off"])
    rows = []
    for variant, values in peaks.items():
        middle = statistics.median(values)
        spread = f"{min(values):.0f} to {max(values):.0f}"
        rows.append([model, variant, f"{middle:.0f}", spread, f"{middle - plain:.0f}", f"{middle / plain:.3f}"])
    return rows


def main() -> int:
    """Measure and print a table in Markdown; with ``--run`` train in this process and print its peak."""
    names = [*models.MODELS, "logits"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS[1:], default=VARIANTS[1:], metavar="VARIANT")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps of a process")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.run:
        model, variant = args.run
        train(model, variant, args.steps)
        print(peak())
        return 0
    rows: list[list[str]] = []
    for model in args.models:
        rows += compare(model, ["off", *args.variants], args.steps, args.threads, args.repeat)
    header = ["model", "variant", "peak (MiB)", "lowest to highest", "more (MiB)", "ratio"]
    print(machine(), f"{args.repeat} processes each", sep=", ", end="\n\n")
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
