"""``gradtrace export``: a recording for another tool's eyes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gradtrace.printable import shell_word

from .lines import say
from .notes import say_notes
from .path import PATH
from .progress import progress
from .selection import steps_option

if TYPE_CHECKING:
    from gradtrace.analysis.tensorboard import Exported


@click.command(
    epilog="""\b
Curves, by the section in which TensorBoard shows them:
  global       loss, grad_norm, lr, loss_scale; NaN and Inf elements in all
  grad_norm    gradients of the module's own parameters, together
  nonfinite    NaN and Inf elements at all boundaries, of modules with any
  output_max   largest magnitude in what the module returns
  output_norm  norm of what it returns
  param_norm   the module's own parameters, together, after the update
  output_norm_evaluation, output_max_evaluation: of calls without grad mode

\b
Example:
  $ gradtrace export run.parquet --tensorboard runs/first
  $ tensorboard --logdir runs""",
)
@click.argument("run", type=PATH)
@click.option("--tensorboard", "directory", type=PATH, metavar="DIR", help="Write event files to DIR.")
@steps_option
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Only steps whose number N divides, and those in which an incident began.",
)
@click.option("--force", is_flag=True, help="Replace what an earlier export wrote to DIR.")
def export(
    run: str, directory: str | None, steps: tuple[int | None, int | None] | None, every: int, force: bool
) -> None:
    """Write curves of the run and of its modules as event files for TensorBoard.

    RUN is a recording: a file, the directory of several ranks, or a glob. Several ranks become a run of
    TensorBoard each, below DIR. Norms and magnitudes are nan or inf as soon as one element is. Of several calls
    of a module in a step, the largest output counts; of several backward passes, the last loss, and the
    gradients after them. For csv and JSON there is `gradtrace sql -f csv`; the recording itself is Parquet.
    """
    if directory is None:
        raise click.UsageError("say what to export to: --tensorboard DIR; for csv there is: gradtrace sql -f csv")
    from gradtrace.analysis import tensorboard

    tensorboard.require_package()
    from gradtrace.analysis.run import open_run

    with open_run(run) as opened:
        with progress("writing") as advance:
            exported = tensorboard.export(opened, directory, steps=steps, every=every, force=force, progress=advance)
        say_notes(opened.missing)
    _say(exported, directory)


def _say(exported: Exported, directory: str) -> None:
    where = exported.files[0] if len(exported.files) == 1 else f"{len(exported.files)} files below {directory}"
    say(f"gradtrace: wrote {where}: {exported.steps:,} steps, {exported.curves:,} curves, {exported.scalars:,} points")
    say(f"gradtrace: to see them: tensorboard --logdir {shell_word(directory)}")
