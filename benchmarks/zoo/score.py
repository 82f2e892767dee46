"""An answer against a case: which of step, phase, module, tensor, op and line are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.zoo.cases import Case

FIELDS = ("step", "phase", "module", "tensor", "op", "line")

Marks = dict[str, "bool | None"]


def score(case: Case, answer: Mapping[str, Any] | None, fields: tuple[str, ...] = FIELDS) -> Marks:
    """Return for each field whether it is right, None where it does not count.

    ``answer`` has the keys of ``gradtrace first-nan --json``, None where there is no answer at all. A healthy case
    has one mark, ``quiet``. Of the readings that are as good, the one that fits best counts as a whole.
    """
    if case.healthy:
        return {"quiet": answer is not None and not answer["found"]}
    if answer is None or not answer["found"]:
        return {name: False if _counts(case, name) else None for name in fields}
    marks = [_marks(case, reading, answer, fields) for reading in case.readings()]
    return max(marks, key=lambda mark: sum(right is True for right in mark.values()))


def _marks(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any], fields: tuple[str, ...]) -> Marks:
    marks: Marks = {}
    for name in fields:
        marks[name] = _RULES[name](case, reading, answer) if _counts(case, name) else None
    return marks


def _counts(case: Case, field: str) -> bool:
    """Whether the field is scored: an op or a line that a case does not have is not."""
    if field == "op":
        return case.truth["op"] is not None
    return field != "line" or bool(case.lines)


def _step(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """The optimizer step with the micro step within it where they are not the loop's ``iteration``, which peers say."""
    if "iteration" in answer:
        return bool(answer["iteration"] == reading["step"])
    if "optimizer_step" not in case.truth:
        return bool(answer["step"] == reading["step"])
    wanted = case.truth["optimizer_step"], case.truth.get("micro_step", 0)
    return (answer["step"], answer.get("micro_step", 0)) == wanted


def _phase(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    return bool(answer["phase"] == reading["phase"])


def _module(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """The name within the model, or with the model's own name before it, or without a wrapper's ``module.``."""
    named, wanted = answer["module"], reading["module"]
    if named is None or wanted is None:
        return named is wanted
    names = {wanted, wanted.removeprefix("module.")}
    model = case.truth.get("model") or _accepted_model(case)
    if model:
        names |= {f"{model}.{name}" if name else model for name in tuple(names)}
    return named in names


def _accepted_model(case: Case) -> str | None:
    """Return the model that only a reading under ``accept`` names."""
    return next((other["model"] for other in case.truth["accept"] if "model" in other), None)


def _tensor(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    return bool(answer["tensor"] == reading["tensor"])


def _op(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """The first op or its first consumer; a list names every op that the answer's word may stand for."""
    said = answer["op"] if isinstance(answer["op"], list) else [answer["op"]]
    return any(op in (reading["op"], case.truth.get("first_consumer")) for op in said if op is not None)


def _line(case: Case, reading: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    location = answer.get("location") or {}
    return location.get("line") in case.lines and str(location.get("file", "")).endswith(case.script.name)


_RULES = {"step": _step, "phase": _phase, "module": _module, "tensor": _tensor, "op": _op, "line": _line}
