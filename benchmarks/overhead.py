"""What it costs to look at a training: ratios of steps with and without, in pairs, on fixed models.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --models mlp cnn --variants floor full --pairs 20 --json costs.json

Blocks of steps without and with a variant take turns in one process; a ratio is that of the two blocks of a pair, and
``off`` compares nothing with nothing: what differs there is the machine. The interval holds the median in 95 of 100
cases (order statistics).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks import tables
from benchmarks.machine import machine
from benchmarks.models import MODELS, Training, make
from benchmarks.pairs import FEWEST_PAIRS, Costs, Rounds, Side, in_a_line, steps_for
from benchmarks.variants import VARIANTS, off, scratch


def measure(name: str, variants: list[str], base: str, pairs: int, seconds: float) -> Costs:
    """Measure variants on one model against ``base``, and ``base`` against itself."""
    failures: dict[str, str] = {}
    try:
        training = make(name)
    except ModuleNotFoundError as error:
        return Costs(name, {}, {"": in_a_line(error)})
    with scratch() as folder:
        sides = {base: _side(base, training, folder)}
        for variant in variants:
            try:
                sides[variant] = _side(variant, training, folder)
            except ModuleNotFoundError as error:
                failures[variant] = in_a_line(error)
        rounds = Rounds(training, sides[base], sides, steps_for(training, seconds))
        rounds.run(pairs)
    _check(name, training)
    return Costs(name, rounds.pairs, failures | rounds.failures)


def _side(name: str, training: Training, folder: Path) -> Side:
    return (off if name == "off" else VARIANTS[name])(training, folder)


def _check(name: str, training: Training) -> None:
    if not torch.isfinite(training.loss()):
        raise SystemExit(f"{name} diverged: what was measured is an incident, not a healthy training")


def main() -> int:
    """Measure what the command line asks for and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in VARIANTS if name != "no_replay"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=names, metavar="VARIANT")
    parser.add_argument("--base", choices=("off", "no_replay", "full", "watch"), default="off", help="to compare with")
    parser.add_argument("--pairs", type=int, default=20, help=f"pairs of blocks, at least {FEWEST_PAIRS}")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a block lasts, about")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all blocks there too")
    args = parser.parse_args()
    if args.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs {args.pairs}: there is no 95 % interval of fewer than {FEWEST_PAIRS}")
    torch.set_num_threads(args.threads)
    measured = []
    for name in args.models:
        measured.append(measure(name, args.variants, args.base, args.pairs, args.seconds))
        print(tables.in_short(measured[-1]), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([costs.as_json() for costs in measured]) + "\n")
    print(machine(), f"{args.pairs} pairs", sep=", ", end="\n\n")
    print(tables.everything(measured, args.base))
    return 0


if __name__ == "__main__":
    sys.exit(main())
