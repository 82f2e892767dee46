"""``gradtrace diff``: where two runs part ways."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from gradtrace.setting_kinds import real

from . import output
from .notes import say_notes
from .path import PATH
from .progress import progress
from .reading import reading
from .selection import rank_option, steps_option

if TYPE_CHECKING:
    from gradtrace.analysis.compare.model import Difference

_ROWS = 20
_TOLERANCE = real("X", lambda number: number >= 0, "a number, 0 or more")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--rtol",
    callback=reading(_TOLERANCE.read),
    metavar="X",
    help="Relative difference that counts. [default: half of the digits of the coarser dtype: float64 1.5e-8, "
    "float32 3.5e-4, float16 0.031, bfloat16 0.088]",
)
@steps_option
@rank_option
@click.option(
    "-M", "--module", "modules", multiple=True, metavar="GLOB", help="Only modules whose name matches GLOB. Repeatable."
)
@click.option(
    "--rows",
    type=click.IntRange(min=-1),
    default=_ROWS,
    show_default=True,
    metavar="N",
    help="Most modules listed; -1 for all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when the runs differ, as git diff does.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
def diff(
    a: str,
    b: str,
    rtol: float | None,
    steps: tuple[int | None, int | None] | None,
    rank: int | None,
    modules: tuple[str, ...],
    rows: int,
    as_json: bool,
    exit_code: bool,
) -> int:
    """Show where two recordings part ways, in execution order.

    A and B are recordings: a file, the directory of several ranks, or a glob, finished or not. What differs in command,
    versions, configuration and modules comes first, then the first boundary whose statistics differ, then the modules
    that are furthest apart. NaN equals NaN; token ids and other integers must be equal. Runs of different length
    are compared in the steps that both have. Other dtypes or devices are said, and are no difference by themselves.

    \b
    Example:
      $ gradtrace diff run.1.parquet run.parquet
      $ gradtrace diff --rtol 0 --exit-code run.1.parquet run.parquet
    """
    from gradtrace.analysis.compare.compare import compare
    from gradtrace.analysis.run import open_run

    with open_run(a) as one, open_run(b) as other, progress("comparing") as show:
        difference = compare(
            one,
            other,
            rtol=rtol,
            steps=steps,
            rank=rank,
            modules=modules,
            most=None if rows < 0 else rows,
            progress=show,
        )
    if as_json:
        output.write_json(difference.to_dict())
    else:
        _show(difference)
    return 1 if exit_code and difference.found else 0


def _show(difference: Difference) -> None:
    from gradtrace.analysis.compare.text import notes, report

    say_notes(notes(difference))
    output.write_blocks(sys.stdout, report(difference))
