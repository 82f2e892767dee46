"""``gradtrace record``: what the user asks for, checked as far as it can be without running anything."""

from __future__ import annotations

import importlib.util
from typing import Any

import click

from gradtrace.errors import CaptureError

from .record_plan import RecordPlan
from .size import read_size
from .step_range import read_step_range

DEFAULT_OUTPUT = "run.parquet"


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  $ gradtrace record train.py --lr 3e-4
  $ gradtrace record --every 10 --include 'layers.*.attn*' -m pkg.train
  $ gradtrace record --on-nonfinite stop train.py
  $ torchrun --nproc-per-node 8 -m gradtrace record train.py""",
)
@click.option("-m", "is_module", is_flag=True, help="Run SCRIPT as a module, like `python -m`.")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="Recording to write: a file, or with more than one rank a directory with a file for each. "
    f"[default: {DEFAULT_OUTPUT}; an older one is moved aside]",
)
@click.option("--force", is_flag=True, help="Overwrite PATH if it exists.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Record every Nth step.",
)
@click.option("--steps", callback=read_step_range, metavar="A:B", help="Only steps A up to, not including, B.")
@click.option(
    "--first-step",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Number of the first step, for a resumed training.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Only modules whose name matches GLOB. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No modules whose name matches GLOB. Repeatable.")
@click.option(
    "--engine",
    type=click.Choice(["graph", "hooks"]),
    default="graph",
    show_default=True,
    metavar="NAME",
    help="How modules are watched: `graph`, or torch's own module `hooks`.",
)
@click.option(
    "--on-nonfinite",
    type=click.Choice(["continue", "stop"]),
    default="continue",
    show_default=True,
    help="Stop the run before bad gradients reach the weights, or go on.",
)
@click.option(
    "--replays",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Run at most N failing passes again, to name the operation.",
)
@click.option(
    "--op-steps",
    callback=read_step_range,
    metavar="A:B",
    help="Record every operation of steps A up to, not including, B. Slow.",
)
@click.option("--no-loss-lines", is_flag=True, help="Note no source lines in the loss code: for very long losses.")
@click.option(
    "--capsule-limit",
    callback=read_size,
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Save no capsule of a failing step that is larger than this.",
)
@click.option("--no-capsule", is_flag=True, help="Save no capsule of the first failing step.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing of gradtrace's own but warnings.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def record(**options: Any) -> RecordPlan:
    """Run a training script and record it.

    Everything after SCRIPT is the script's own. It sees the arguments, the import path and the exit code that
    `python SCRIPT` would give it.
    """
    from . import recording

    output = options.pop("output")
    plan = RecordPlan(**options, path=DEFAULT_OUTPUT if output is None else output, moves_aside=output is None)
    if importlib.util.find_spec("torch") is None:
        raise CaptureError("record needs PyTorch: pip install torch")
    recording.check(plan)
    return plan
