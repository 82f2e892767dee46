"""Whether the cost of a module, and of a step, stays what it is as a model or a run grows.

    python -m benchmarks.growth
    python -m benchmarks.growth --what steps --steps 5000

A model of N modules is containers nested in each other, each with its share of the others and a residual around it,
so that the autograd graph of each container holds those of all that it contains. With the number of modules, and with
the depth at the same number, what full capture adds per module should stay about the same. In a run of a tiny model the
last tenth of the steps should take as long as the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.models import LEARNING_RATE, Training
from benchmarks.pairs import FEWEST_PAIRS, Estimate, Rounds, Side, difference, estimate, steps_for
from benchmarks.tables import bounded, table
from benchmarks.variants import VARIANTS, off, scratch

MODULES = (10, 100, 500, 2000)
DEPTHS = (1, 5, 25, 100)
DEPTH, COUNT = 5, 500
"""The depth at which modules grow, and the number of modules at which the depth grows."""

WIDTH = 16
SETTLED = 20
"""Steps of a run before those that are compared: caches fill."""


class Container(nn.Sequential):
    """Some modules with a residual around them."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs plus what the modules make of them."""
        result: Tensor = inputs + super().forward(inputs)
        return result


def nested(modules: int, depth: int) -> nn.Module:
    """Return a model of exactly ``modules`` modules, ``depth`` of which are containers, each within the one before."""
    leaves = modules - depth
    model: list[nn.Module] = []
    for level in range(depth):
        share = leaves * (level + 1) // depth - leaves * level // depth
        # LayerNorms in a row keep both values and gradients in range, whatever their number.
        model = [Container(*(nn.LayerNorm(WIDTH) for _ in range(share)), *model)]
    return model[0]


def training_of(model: nn.Module) -> Training:
    """Return the training of a model of this module's width on a small batch."""
    inputs, targets = torch.randn(2, 8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return Training(model, optimizer, lambda: nn.functional.mse_loss(model(inputs), targets))


def added(modules: int, depth: int, variant: str, pairs: int, seconds: float) -> Estimate:
    """Return the milliseconds a step that a variant adds for a model of so many modules."""
    training = training_of(nested(modules, depth))
    with scratch() as folder:
        sides = {variant: VARIANTS[variant](training, folder)}
        rounds = Rounds(training, off(training, folder), sides, steps_for(training, seconds))
        rounds.run(pairs)
    if rounds.failures:
        raise SystemExit(f"{variant}: {rounds.failures[variant]}")
    return difference(rounds.pairs[variant])


def by_modules(variant: str, pairs: int, seconds: float) -> str:
    """Return tables of what a module costs, by the number of modules and by the depth."""
    parts = []
    for title, sizes in (
        ("modules", [(count, DEPTH) for count in MODULES]),
        ("depth", [(COUNT, depth) for depth in DEPTHS]),
    ):
        rows = []
        for modules, depth in sizes:
            cost = added(modules, depth, variant, pairs, seconds)
            each = Estimate(*(1000 * value / modules for value in cost))
            rows.append([str(modules), str(depth), bounded(cost, 2), bounded(each, 1)])
            print(f"{title}: {' '.join(rows[-1])}", file=sys.stderr, flush=True)
        parts.append(table(["modules", "depth", "ms a step more", "us a module more"], rows))
    return "\n\n".join(parts)


def last_to_first(training: Training, side: Side, steps: int) -> float:
    """Return the median step of the last tenth of a run as a multiple of that of the first."""
    times = []
    with side.watch():
        for _ in range(SETTLED + steps):
            start = time.perf_counter()
            training.step()
            times.append(time.perf_counter() - start)
    tenth = steps // 10
    return statistics.median(times[-tenth:]) / statistics.median(times[SETTLED : SETTLED + tenth])


def by_steps(variant: str, runs: int, steps: int) -> str:
    """Return a table of how a step's time changes over a run."""
    training = training_of(nested(10, 2))
    rows = []
    with scratch() as folder:
        for name, side in (("off", off(training, folder)), (variant, VARIANTS[variant](training, folder))):
            ratios = estimate(last_to_first(training, side, steps) for _ in range(runs))
            rows.append([name, str(steps), bounded(ratios)])
    return table(["variant", "steps", "last tenth to first"], rows)


def main() -> int:
    """Measure what the command line asks for and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("modules", "steps"), default=["modules", "steps"])
    parser.add_argument("--variant", choices=VARIANTS, default="full")
    parser.add_argument("--pairs", type=int, default=10, help=f"pairs of blocks, and runs; at least {FEWEST_PAIRS}")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a block lasts, about")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run, at least 100")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    args = parser.parse_args()
    if args.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs {args.pairs}: there is no 95 % interval of fewer than {FEWEST_PAIRS}")
    if args.steps < 100:
        parser.error(f"--steps {args.steps}: a tenth of it is too little; at least 100")
    torch.set_num_threads(args.threads)
    print(machine(), f"{args.pairs} pairs", sep=", ")
    if "modules" in args.what:
        print("", by_modules(args.variant, args.pairs, args.seconds), sep="\n")
    if "steps" in args.what:
        print("", by_steps(args.variant, args.pairs, args.steps), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
