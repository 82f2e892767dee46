"""All of rules.md: made of the rule files, so that the page says what ``gradtrace check`` does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from gradtrace.analysis.check.rule_files import Rule, Threshold, all_rules

_WIDTH = 120
_HEAD = """\
# The rules of `gradtrace check`

`gradtrace check run.parquet` asks a recording for what precedes a NaN or wastes a run. Each rule is one small SQL file,
`gradtrace/analysis/check/rules/NAME.sql`, and this page is made of their heads. A finding says since which step it is
so, the value that was seen and the threshold that it lies beyond; the earliest comes first.

* `--rule NAME` asks only this rule, `--set NAME.THRESHOLD=VALUE` gives a threshold another value, and `--list` shows
  them all.
* `--steps A:B` and `--rank N` limit what is looked at: a rule that compares with the steps before sees those of the
  range only.
* `--exit-code` exits with 1 when something was found, `-f json` has every finding with all of its columns.
* In Python: `gradtrace.open_run(path).check(rules=["near-overflow"], thresholds={"near-overflow.factor": 8})`.

What holds for every rule: records of single operations and of a replay are passed over. Gradients are taken as they
arrive, before anything clips or unscales them; their norm has the loss scale of the step taken out, where there is one.
Values that are not finite are passed over: they are what `gradtrace first-nan` is for. Each rank is looked at for
itself. Recorded steps on end are steps that stand next to each other in the recording; in a thinned one they lie apart.
A rule for which there are too few steps is named in a note.

A finding is a hint, not a verdict. Where a number is our choice the page says so; change it with `--set` where your
training is of another kind.
"""


def page() -> str:
    """Return the whole page."""
    rules = all_rules()
    table = ["| rule | severity | what it finds |", "|---|---|---|"]
    table += [f"| [`{rule.name}`](#{rule.name}) | {rule.severity} | {rule.title} |" for rule in rules]
    parts = [_HEAD, "\n".join(table) + "\n", *("\n".join(_section(rule)) + "\n" for rule in rules)]
    return "\n".join(parts)


def _section(rule: Rule) -> Iterator[str]:
    steps = f"{rule.least_steps:,} {'step' if rule.least_steps == 1 else 'steps'}"
    yield f"## {rule.name}"
    yield ""
    yield textwrap.fill(f"{rule.title}. {rule.meaning}", _WIDTH)
    yield ""
    yield _item(f"Usual mend: {rule.mend}")
    yield _item(f"Value: {rule.value.rstrip('.')}.")
    yield _item(f"Looks at: {rule.looks_at.rstrip('.')}.")
    yield f"* Needs {steps}{', captured in full' if rule.needs_full else ''}."
    yield ""
    yield "| threshold | default | what it is | where it is from |"
    yield "|---|---:|---|---|"
    yield from map(_line, rule.thresholds)


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="* ", subsequent_indent="  ")


def _line(threshold: Threshold) -> str:
    value = f"{threshold.value:.10g} {threshold.unit}".rstrip()
    return f"| `{threshold.name}` | {value} | {threshold.meaning} | {threshold.source} |"
