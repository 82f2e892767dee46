"""``gradtrace recheck``: the failing step again, in the script as it is now."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import click

from gradtrace.errors import CaptureError

from .lines import line
from .notes import say_notes
from .output import write_json
from .path import PATH
from .script_command import ScriptCommand

if TYPE_CHECKING:
    from gradtrace.capture.recheck.ask import Part, RecheckResult


@click.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  $ gradtrace recheck run.capsule.pt train.py --lr 3e-4
  $ gradtrace recheck --json -m run.capsule.pt pkg.train""",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("-m", "is_module", is_flag=True, help="Run SCRIPT as a module, like `python -m`.")
@click.argument("capsule", type=PATH)
@click.argument("script", type=PATH)
@click.argument("args", nargs=-1, type=PATH)
def recheck(capsule: str, script: str, args: tuple[str, ...], as_json: bool, is_module: bool) -> int:
    """Run the failing step again in a mended script: is all of it finite now?

    CAPSULE is what `record` saved of the step. SCRIPT runs up to its first training step, which gets the captured
    batch, weights and random numbers, and is stopped before the optimizer. Exits with 1 unless all is finite.
    """
    from gradtrace.capture.recheck.ask import recheck as check

    if importlib.util.find_spec("torch") is None:
        raise CaptureError("recheck needs PyTorch: pip install torch")
    result = check(capsule, script, args, is_module=is_module)
    if as_json:
        write_json(result.to_dict())
    else:
        _show(result)
    return 0 if result.ok else 1


def _show(result: RecheckResult) -> None:
    say_notes([f"captured: {result.failed}", *result.notes])
    width = max(map(len, result.parts))
    for name, part in result.parts.items():
        line(f"{name.ljust(width)}  {_in_words(part)}")


def _in_words(part: Part) -> str:
    if part.status == "not checked":
        return f"not checked: {part.reason}"
    if part.status == "finite":
        return "finite"
    made_by = f"anomaly detection stops at {part.op}" if part.op else ""
    where = f", {part.location}" if part.location else ""
    return f"not finite: {'; '.join(words for words in (part.boundary, made_by + where) if words)}"
