"""``gradtrace record``: what the user asks for, checked as far as it can be without running anything."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import click

from gradtrace import settings
from gradtrace.errors import CaptureError

from .path import PATH
from .record_plan import RecordPlan
from .setting_options import SectionedCommand, setting_option

DEFAULT_OUTPUT = "run.parquet"

_CAPTURED = (
    *("every", "steps", "first_step", "include", "exclude"),
    *("engine", "op_steps", "keep_compiled", "loss_lines", "max_size"),
)
_WATCH = ("baseline", *(key for key in settings.SETTINGS if key.startswith("watch_")))
_FAILING = ("on_nonfinite", "replays", "capsule_limit")


def _setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for key in reversed((*_CAPTURED, *_WATCH, *_FAILING)):
        command = setting_option(key)(command)
    return command


@click.command(
    cls=SectionedCommand,
    sections={
        "What is captured": _CAPTURED,
        "Watch mode": ("mode", *_WATCH),
        "When a step fails": (*_FAILING, "no_capsule"),
    },
    context_settings={"allow_interspersed_args": False},
    epilog="""Steps that are not captured in full are watched: what goes wrong in one of them is found, and its
replay captures it. What stands below "Options" can be configured, too: as first_step in [tool.gradtrace] of
pyproject.toml, or by the variable GRADTRACE_FIRST_STEP.

\b
Examples:
  $ gradtrace record train.py --lr 3e-4
  $ gradtrace record --watch train.py
  $ gradtrace record --every 10 --include 'layers.*.attn*' -m pkg.train
  $ gradtrace record --on-nonfinite stop train.py
  $ torchrun --nproc-per-node 8 -m gradtrace record train.py""",
)
@click.option("-m", "is_module", is_flag=True, help="Run SCRIPT as a module, like `python -m`.")
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="PATH",
    help="Recording to write: a file, or with more than one rank a directory with a file for each. "
    f"[default: {DEFAULT_OUTPUT}; an older one is moved aside]",
)
@click.option("--force", is_flag=True, help="Overwrite PATH if it exists.")
@click.option(
    "--watch",
    "mode",
    flag_value="watch",
    help="Capture only the first steps in full, and a few after something unusual; watch the others.",
)
@click.option("--full", "mode", flag_value="full", help="Capture every step in full. [default]")
@_setting_options
@click.option("--no-capsule", is_flag=True, help="Save no capsule of the first failing step.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing of gradtrace's own but warnings.")
@click.argument("script", type=PATH)
@click.argument("args", nargs=-1, type=PATH)
def record(
    script: str,
    args: tuple[str, ...],
    is_module: bool,
    output: str | None,
    force: bool,
    no_capsule: bool,
    quiet: bool,
    **given: Any,
) -> RecordPlan:
    """Run a training script and record it.

    Everything after SCRIPT is the script's own. It sees the arguments, the import path and the exit code that
    `python SCRIPT` would give it.
    """
    from . import recording

    given = {key: value for key, value in given.items() if value not in (None, ())}
    plan = RecordPlan(
        script=script,
        args=args,
        is_module=is_module,
        path=DEFAULT_OUTPUT if output is None else output,
        moves_aside=output is None,
        force=force,
        quiet=quiet,
        settings=settings.load(given | ({"capsule_limit": 0} if no_capsule else {})),
    )
    _refuse_watch_options(given, plan.settings.mode)
    if importlib.util.find_spec("torch") is None:
        raise CaptureError("record needs PyTorch: pip install torch")
    recording.check(plan)
    return plan


def _refuse_watch_options(given: Mapping[str, Any], mode: settings.Mode) -> None:
    """Refuse what would have no effect, where it was asked for on the command line and not merely configured."""
    without_effect = [settings.SETTINGS[key].option for key in given if key in _WATCH]
    if mode == "full" and without_effect:
        raise click.UsageError(f"{without_effect[0]} is for watch mode: pass --watch, too", click.get_current_context())
