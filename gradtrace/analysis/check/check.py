"""What precedes a NaN or wastes a run: the rules of ``rules/`` asked of a recording.

Each rule is one query; what they share, the boundaries in question and two small tables made of them, is ``check.sql``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import resources

import duckdb

from gradtrace.analysis.check.model import Ask, Checkup, Symptom
from gradtrace.analysis.check.rule_files import SEVERITIES, Rule, chosen_rules
from gradtrace.analysis.recording import Recording, answers
from gradtrace.errors import NoMatchError

_NO_END = 2**62
_FIELDS = ("rank", "module", "tensor", "path", "since", "step", "value", "threshold", "note")
_MODEL_ORDER = "SELECT module, number FROM modules"
_EXTENT = """
SELECT
    (SELECT count(DISTINCT step) FROM course),
    (SELECT count(DISTINCT step) FROM course WHERE in_full),
    (SELECT count(DISTINCT rank) FROM course)
"""
_WHOLE = "SELECT min(step), max(step), list(DISTINCT rank ORDER BY rank) FROM records"


@answers
def check(
    run: Recording,
    *,
    rules: Sequence[str] = (),
    thresholds: Mapping[str, float] | None = None,
    steps: tuple[int | None, int | None] | None = None,
    rank: int | None = None,
) -> Checkup:
    """Ask the rules of a run, by default all of them.

    ``rules`` are names; ``thresholds`` maps ``RULE.THRESHOLD`` to another value. ``steps`` limits what is looked at to
    steps from the first up to, not including, the second; ``rank`` to one process.

    Raises:
        NoMatchError: there is no such rule, threshold, step or rank.
    """
    chosen = chosen_rules(rules, thresholds)
    connection = run.connection.cursor()  # what a temporary table is to one cursor, another does not see
    with closing(connection):
        _prepare(connection, steps, rank)
        count, full, ranks = connection.execute(_EXTENT).fetchall()[0]
        if not count and (steps is not None or rank is not None):
            raise NoMatchError(_nothing(run, steps, rank))
        answers = [_ask(connection, rule, full if rule.needs_full else count) for rule in chosen]
    symptoms = _sorted([symptom for _, found in answers for symptom in found], run)
    return Checkup(symptoms, [ask for ask, _ in answers], count, full, len(run.info.modules), ranks)


def _prepare(
    connection: duckdb.DuckDBPyConnection, steps: tuple[int | None, int | None] | None, rank: int | None
) -> None:
    first, end = steps or (None, None)
    connection.execute(f"SET VARIABLE first_step = {-_NO_END if first is None else int(first)}")
    connection.execute(f"SET VARIABLE end_step = {_NO_END if end is None else int(end)}")
    connection.execute(f"SET VARIABLE only_rank = {'NULL::INTEGER' if rank is None else int(rank)}")
    connection.execute(resources.files("gradtrace.analysis.check").joinpath("check.sql").read_text(encoding="utf-8"))


def _ask(connection: duckdb.DuckDBPyConnection, rule: Rule, steps: int) -> tuple[Ask, list[Symptom]]:
    """Return how it went and what was found; ``steps`` is the number of those it can look at."""
    if steps < rule.least_steps:
        kind = "steps captured in full" if rule.needs_full else "steps"
        return Ask(rule, lacks=f"needs {rule.least_steps:,} {kind}"), []
    started = time.perf_counter()
    query = f"SELECT {', '.join(_FIELDS)} FROM (\n{rule.query}\n)"
    rows = connection.execute(query, rule.parameters).fetchall()
    found = [Symptom(rule.name, rule.severity, *row) for row in rows]
    return Ask(rule, time.perf_counter() - started, len(found)), found


def _sorted(symptoms: list[Symptom], run: Recording) -> list[Symptom]:
    """Return them the earliest first, then the worst, then in the model's order."""
    numbers = dict(run.execute(_MODEL_ORDER).fetchall())

    def key(symptom: Symptom) -> tuple[int, int, str, int, int, str, str]:
        number = -1 if symptom.module is None else numbers.get(symptom.module, len(numbers))
        severity = SEVERITIES.index(symptom.severity)
        return symptom.since, severity, symptom.rule, symptom.rank, number, symptom.tensor, symptom.path or ""

    return sorted(symptoms, key=key)


def _nothing(run: Recording, steps: tuple[int | None, int | None] | None, rank: int | None) -> str:
    first, last, ranks = run.execute(_WHOLE).fetchall()[0]
    if first is None:
        return f"{run.path} holds no step"
    if rank is not None and rank not in ranks:
        return f"{run.path} has no rank {rank}; it has: {', '.join(map(str, ranks))}"
    asked = ":".join("" if step is None else str(step) for step in steps or (None, None))
    return f"no recorded step lies in {asked}; the run has {first} to {last}"
