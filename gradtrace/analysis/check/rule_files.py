"""The rules of ``check``: a SQL file each under ``rules/``, whose comments at the top say what it is. Read here.

The head is lines ``-- key: text``, continued by lines that start with ``--   ``. The first key is the rule's name and
its text the title; a threshold is ``-- threshold NAME = VALUE UNIT: meaning`` and, below it, ``-- source NAME: where it
is from``. The query has the thresholds as parameters (``$NAME``) and asks the views of ``check.sql``.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from gradtrace.errors import NoMatchError

SEVERITIES = ("serious", "warning", "note")
"""From the worst down."""

_KEYS = ("severity", "meaning", "mend", "value", "looks at", "needs")
_ENTRY = re.compile(r"^-- (\S[^:]*): ?(.*)$")
_THRESHOLD = re.compile(r"^threshold (\w+) = (\S+) ?(.*)$")


@dataclass(frozen=True)
class Threshold:
    """A number that a rule compares with: its value and unit, what it means, and where the number is from."""

    name: str
    value: float
    unit: str
    meaning: str
    source: str


@dataclass(frozen=True)
class Rule:
    """One rule: what it tells, what usually mends it, and the query that finds it.

    ``looks_at`` says of which records, and of which not; ``value`` what a finding's value is. ``needs`` is the number
    of steps without which it can say nothing, as a sum of numbers and thresholds: "history + 1", "steps full".
    """

    name: str
    title: str
    severity: str
    meaning: str
    mend: str
    value: str
    looks_at: str
    needs: str
    thresholds: tuple[Threshold, ...]
    query: str

    @property
    def needs_full(self) -> bool:
        """Whether only steps that were captured in full have what it looks at."""
        return self.needs.endswith(" full")

    @property
    def least_steps(self) -> int:
        """Number of steps without which it can say nothing."""
        values = {threshold.name: threshold.value for threshold in self.thresholds}
        words = self.needs.removesuffix(" full").split(" + ")
        return int(sum(values[word] if word in values else int(word) for word in words))

    @property
    def parameters(self) -> dict[str, float]:
        """The thresholds as parameters of the query."""
        return {threshold.name: threshold.value for threshold in self.thresholds}


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule, the worst first, by name among equals."""
    files = resources.files("gradtrace.analysis.check").joinpath("rules").iterdir()
    rules = [read_rule(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".sql")]
    return tuple(sorted(rules, key=lambda rule: (SEVERITIES.index(rule.severity), rule.name)))


def chosen_rules(names: Sequence[str] = (), thresholds: Mapping[str, float] | None = None) -> list[Rule]:
    """Return the rules of these names, by default all, with other values for some thresholds.

    ``thresholds`` maps ``RULE.THRESHOLD`` to a value.

    Raises:
        NoMatchError: there is no such rule or threshold.
    """
    rules = {rule.name: rule for rule in all_rules()}
    for place, value in (thresholds or {}).items():
        name, _, threshold = place.rpartition(".")
        rule = rules[_known(name, rules, "rule")]
        _known(threshold, [one.name for one in rule.thresholds], f"threshold of {name}")
        changed = (replace(one, value=value) if one.name == threshold else one for one in rule.thresholds)
        rules[name] = replace(rule, thresholds=tuple(changed))
    wanted = {_known(name, rules, "rule") for name in names}
    return [rule for rule in rules.values() if not wanted or rule.name in wanted]


def read_rule(text: str) -> Rule:
    """Return the rule that the text of a file describes.

    Raises:
        ValueError: the head lacks something, or has what it should not.
    """
    head, query = _parted(text)
    name, title = next(iter(head.items()))
    thresholds = tuple(_thresholds(head))
    sources = [f"source {threshold.name}" for threshold in thresholds]
    known = {name, *_KEYS, *sources, *(key for key in head if key.startswith("threshold "))}
    if odd := set(head) ^ known:
        raise ValueError(f"the head of {name} lacks or should not have: {', '.join(sorted(odd))}")
    if head["severity"] not in SEVERITIES:
        raise ValueError(f"the severity of {name} is none of {', '.join(SEVERITIES)}: {head['severity']}")
    return Rule(
        name=name,
        title=title,
        severity=head["severity"],
        meaning=head["meaning"],
        mend=head["mend"],
        value=head["value"],
        looks_at=head["looks at"],
        needs=head["needs"],
        thresholds=thresholds,
        query=query,
    )


def _parted(text: str) -> tuple[dict[str, str], str]:
    """Return the head's keys and texts, and the query below it."""
    lines = text.splitlines()
    length = next((number for number, line in enumerate(lines) if not line.startswith("--")), len(lines))
    head: dict[str, str] = {}
    for line in lines[:length]:
        if line.startswith("--   ") and head:
            key = next(reversed(head))
            head[key] += " " + line[2:].strip()
        elif match := _ENTRY.match(line):
            head[match[1].strip()] = match[2].strip()
        else:
            raise ValueError(f"no key and no continuation: {line}")
    if not head:
        raise ValueError("the file does not begin with a head of comments")
    return head, "\n".join(lines[length:]).strip()


def _thresholds(head: Mapping[str, str]) -> Iterator[Threshold]:
    for key, meaning in head.items():
        if match := _THRESHOLD.match(key):
            name, value, unit = match.groups()
            yield Threshold(name, float(value), unit.strip(), meaning, head.get(f"source {name}", ""))


def _known(name: str, names: Iterable[str], what: str) -> str:
    """Return the name, which has to be one of the names; the error has the one that was probably meant."""
    there = list(names)
    if name in there:
        return name
    close = difflib.get_close_matches(name, there, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(there)}"
    raise NoMatchError(f"no {what}: {name!r}; {meant}")
