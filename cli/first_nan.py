"""``gradtrace first-nan``: the verdict, as text or as JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from . import output
from .notes import say_notes
from .path import PATH
from .selection import rank_option, steps_option

if TYPE_CHECKING:
    from gradtrace.analysis.verdict_model import Verdict


@click.command(
    "first-nan",
    epilog="""\b
Examples:
  $ gradtrace first-nan run.parquet
  $ gradtrace first-nan --incident 2 --context 20 run.parquet
  $ gradtrace first-nan --json --exit-code run.parquet""",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
@click.option(
    "--exit-code", is_flag=True, help="Exit with 1 when something was found, with 3 when a damaged part may hold it."
)
@click.option(
    "--incident",
    type=click.IntRange(min=1),
    metavar="N",
    help="Take the Nth incident. [default: the one that never ended, else the first]",
)
@steps_option
@rank_option
@click.option(
    "--context",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Show N records that came before.",
)
@click.option("--skipped", is_flag=True, help="Name what made GradScaler skip steps, which as such do not matter.")
@click.argument("run", type=PATH)
def first_nan(
    run: str,
    as_json: bool,
    exit_code: bool,
    incident: int | None,
    steps: tuple[int | None, int | None] | None,
    rank: int | None,
    context: int,
    skipped: bool,
) -> int:
    """Name the first NaN or Inf that matters, what made it, and what led to it.

    RUN is a recording: a file, the directory of several ranks, or a glob.
    """
    from gradtrace.analysis.run import open_run

    with open_run(run) as opened:
        verdict = opened.first_nan(incident=incident, steps=steps, rank=rank, context=context, skipped=skipped)
    if as_json:
        output.write_json(verdict.to_dict())
    else:
        _show(verdict)
    if not exit_code:
        return 0
    return 1 if verdict.found else 3 if verdict.run.damaged else 0


def _show(verdict: Verdict) -> None:
    from gradtrace.analysis.verdict_text import notes, report

    say_notes(notes(verdict))
    output.write_blocks(sys.stdout, report(verdict))
