"""``gradtrace check``: the rules for what precedes a NaN or wastes a run."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from gradtrace.analysis.labels import module_label
from gradtrace.errors import NoMatchError
from gradtrace.setting_kinds import real

from .format_option import format_option
from .lines import line
from .notes import say_notes
from .output import write
from .path import PATH
from .selection import rank_option, steps_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtrace.analysis.check.model import Checkup, Symptom
    from gradtrace.analysis.check.rule_files import Rule

_ROWS = 10
_WIDTH = 100
_VALUE = real("VALUE", lambda value: value >= 0, "a number, 0 or more")
_LISTED = ("rule", "severity", "title", "threshold", "value", "unit", "meaning", "source")


def _complete_rule(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from gradtrace.analysis.check.rule_files import all_rules

    return [CompletionItem(rule.name, help=rule.title) for rule in all_rules() if rule.name.startswith(incomplete)]


def _read_thresholds(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    """Read ``RULE.THRESHOLD=VALUE``, any number of times."""
    thresholds = {}
    for text in values:
        place, equals, value = text.partition("=")
        if not equals or "." not in place:
            raise click.BadParameter(f"{text!r} is not RULE.THRESHOLD=VALUE, as in near-overflow.factor=8", ctx, param)
        try:
            thresholds[place.strip()] = _VALUE.read(value.strip())
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None
    return thresholds


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=PATH, required=False)
@click.option(
    "--rule",
    "names",
    multiple=True,
    metavar="NAME",
    shell_complete=_complete_rule,
    help="Only this rule; may be given several times.",
)
@click.option(
    "--set",
    "thresholds",
    multiple=True,
    callback=_read_thresholds,
    metavar="RULE.THRESHOLD=VALUE",
    help="Another value for a threshold; may be given several times.",
)
@click.option("--list", "as_list", is_flag=True, help="Show the rules, their thresholds and where these are from.")
@steps_option
@rank_option
@click.option(
    "--rows",
    type=click.IntRange(min=-1),
    default=_ROWS,
    show_default=True,
    metavar="N",
    help="Most rows of a rule in a table; -1 for all. Other formats have all rows.",
)
@format_option
@click.option("--exit-code", is_flag=True, help="Exit with 1 when something was found.")
def check(
    run: str | None,
    names: Sequence[str],
    thresholds: dict[str, float],
    as_list: bool,
    steps: tuple[int | None, int | None] | None,
    rank: int | None,
    rows: int,
    form: str,
    exit_code: bool,
) -> int:
    """Look for what precedes a NaN or wastes a run: exploding gradients, dead outputs, weights that never change.

    RUN is a recording: a file, the directory of several ranks, or a glob. A finding says since which step it is so, and
    its value beside the rule's threshold; the earliest comes first.

    \b
    Example:
      $ gradtrace check run.parquet
      $ gradtrace check run.parquet --rule dead-output --rule large-update
      $ gradtrace check run.parquet --set near-overflow.factor=16
      $ gradtrace check --list
    """
    if (run is None) != as_list:
        raise click.UsageError("give a RUN, or --list")
    from gradtrace.analysis.check.rule_files import chosen_rules

    try:
        chosen = chosen_rules(names, thresholds)
    except NoMatchError as error:
        raise click.UsageError(str(error)) from None
    if run is None:
        _list(chosen, form)
        return 0
    from gradtrace.analysis.run import open_run

    with open_run(run) as opened:
        checkup = opened.check(rules=names, thresholds=thresholds, steps=steps, rank=rank)
        notes = [*opened.missing, *_lacking(checkup)]
    if form == "table":
        _show(checkup, rows)
    else:
        write(sys.stdout, form, checkup.columns, checkup.rows, digits=4)
    say_notes(notes)
    return 1 if exit_code and checkup.found else 0


def _show(checkup: Checkup, most: int) -> None:
    """Print the findings, what the rules mean that found them, and how many there are."""
    shown, rest = _shortened(checkup.symptoms, most)
    if shown:
        ranks = ["rank"] if checkup.ranks > 1 else []
        columns = ["since", *ranks, "rule", "module", "tensor", "value", "threshold", "note"]
        write(sys.stdout, "table", columns, [_cells(symptom, columns) for symptom in shown], digits=4)
    for name, count in rest.items():
        line(f"and {count:,} more of {name} (--rows -1 shows all)")
    for ask in checkup.asks:
        if ask.found:
            line()
            _explain(ask.rule)
    if checkup.found:
        line()
    line(checkup.conclusion)


def _shortened(symptoms: Sequence[Symptom], most: int) -> tuple[list[Symptom], dict[str, int]]:
    """Return the first findings of each rule, and the number of the others by rule."""
    seen: Counter[str] = Counter()
    shown = []
    for symptom in symptoms:
        seen[symptom.rule] += 1
        if most < 0 or seen[symptom.rule] <= most:
            shown.append(symptom)
    return shown, {name: count - most for name, count in seen.items() if 0 <= most < count}


def _cells(symptom: Symptom, columns: Sequence[str]) -> list[Any]:
    tensor = f"{symptom.tensor} {symptom.path}" if symptom.path else symptom.tensor
    cells = {"module": None if symptom.module is None else module_label(symptom.module), "tensor": tensor}
    return [cells.get(column, getattr(symptom, column)) for column in columns]


def _explain(rule: Rule) -> None:
    """Print what a rule means, and the usual mend."""
    _print_wrapped(f"{rule.name} ({rule.severity}): {rule.title}. {rule.meaning}", "", "  ")
    _print_wrapped(f"Usual mend: {rule.mend}", "  ", "  ")


def _print_wrapped(text: str, first: str, others: str) -> None:
    for part in textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others):
        line(part)


def _lacking(checkup: Checkup) -> list[str]:
    """Return a note on the rules that could not be asked."""
    lacking = [f"{ask.rule.name} {ask.lacks}" for ask in checkup.lacking]
    return [f"too few steps for some rules: {', '.join(lacking)}"] if lacking else []


def _list(rules: Sequence[Rule], form: str) -> None:
    if form != "table":
        rows = [
            (rule.name, rule.severity, rule.title, one.name, one.value, one.unit, one.meaning, one.source)
            for rule in rules
            for one in rule.thresholds
        ]
        write(sys.stdout, form, _LISTED, rows)
        return
    for number, rule in enumerate(rules):
        if number:
            line()
        line(f"{rule.name} ({rule.severity}): {rule.title}")
        for one in rule.thresholds:
            value = f"{one.name} = {one.value:.6g} {one.unit}".rstrip()
            for text, indent in ((f"{value}: {one.meaning}", 2), (f"source: {one.source}", 6)):
                _print_wrapped(text, indent * " ", (indent + 2) * " ")
