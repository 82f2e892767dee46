"""The scores as tables: what is right case by case, and how many are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.zoo.cases import GROUPS

Result = dict[str, Any]
MARK = {True: "ok", False: "WRONG", None: "-"}


def by_case(results: Sequence[Result], fields: Sequence[str]) -> str:
    """Return one line a case: the mark of every field, and what was said where one is wrong."""
    rows = [("case", *fields, "said")]
    for result in results:
        marks = result["marks"]
        if "quiet" in marks:
            cells = [MARK[marks["quiet"]]] + [""] * (len(fields) - 1)
        else:
            cells = [MARK[marks[field]] for field in fields]
        rows.append((result["id"], *cells, "" if all_right(marks) else result["said"]))
    return aligned(rows)


def totals(results: Sequence[Result], fields: Sequence[str]) -> str:
    """Return one line a group: right answers of those that count, by field, and the healthy runs left in peace."""
    rows = [("", *fields, "step and phase", "quiet when healthy")]
    for group in GROUPS:
        marks = [result["marks"] for result in results if result["group"] == group]
        failing = [mark for mark in marks if "quiet" not in mark]
        quiet = [mark["quiet"] for mark in marks if "quiet" in mark]
        both = [mark.get("step") is True and mark.get("phase") is True for mark in failing]
        counted = [_count(mark[field] for mark in failing) for field in fields]
        rows.append((group, *counted, _count(both), _count(quiet)))
    return aligned(rows)


def all_right(marks: dict[str, bool | None]) -> bool:
    """Whether no mark is wrong."""
    return all(mark is not False for mark in marks.values())


def _count(marks: Iterable[bool | None]) -> str:
    counted = [mark for mark in marks if mark is not None]
    return f"{sum(counted)} of {len(counted)}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows with their columns under one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as a Markdown table, the first one its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
