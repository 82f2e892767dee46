"""What the tests of the rules share: rows of a few steps, and what one rule says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradtrace.analysis.check.model import Checkup, Symptom
from tests.analysis.rows import Rows, open_rows


def checkup(tmp_path: Path, rows: Rows, **options: Any) -> Checkup:
    """Write the rows as a run and ask the rules of it."""
    with open_rows(tmp_path, rows) as run:
        return run.check(**options)


def said(tmp_path: Path, rows: Rows, rule: str, **options: Any) -> list[Symptom]:
    """Return what one rule finds in the rows."""
    found = checkup(tmp_path, rows, rules=[rule], **options)
    assert found.lacking == []
    return found.symptoms


def brief(symptoms: Iterable[Symptom]) -> list[tuple[str | None, int, int, float, float]]:
    """Return module, since, step, value and threshold of each."""
    return [(one.module, one.since, one.step, one.value, one.threshold) for one in symptoms]


def gradients(rows: Rows, module: str, norms: Sequence[float], **values: Any) -> None:
    """Add a step for each norm, with a gradient of it; eight elements unless said otherwise."""
    for norm in norms:
        rows.add("backward", module, "grad", "weight", min=-norm, max=norm, norm=norm, **values)
        rows.step += 1


def losses(rows: Rows, values: Sequence[float]) -> None:
    """Add a step for each loss."""
    for value in values:
        rows.scalar("loss", "loss", value)
        rows.step += 1


def outputs(rows: Rows, module: str, largest: Sequence[float], smallest: float = 0.0, **values: Any) -> None:
    """Add a step for each largest element, with an output whose smallest is ``smallest``."""
    for value in largest:
        rows.add("input", "", "input")  # which a step has that was captured in full
        rows.add("forward", module, "output", min=smallest, max=value, norm=value, **values)
        rows.step += 1


def weights(rows: Rows, norms: Sequence[float], **values: Any) -> None:
    """Add the weight that the run starts with, then a step for each further norm, after its update."""
    facts = {"shape": "[2, 4]"} | values
    rows.add("input", "fc1", "param", "weight", min=-norms[0], max=norms[0], norm=norms[0], **facts)
    for norm in norms[1:]:
        rows.add("input", "", "input")
        rows.add("optimizer", "fc1", "param", "weight", min=-norm, max=norm, norm=norm, **facts)
        rows.step += 1
