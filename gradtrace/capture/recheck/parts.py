"""The recording of a rechecked step -> input, forward, loss and gradients, each finite or not. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from gradtrace.capture.recheck.ask import Part
from gradtrace.trace.incident import looks_like_mask
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import Record

_STATES = ("param", "buffer")
_BACKWARD = ("grad_output", "grad_input", "grad")


@dataclass(frozen=True)
class Anomaly:
    """What anomaly detection stopped at: the node, its words, and the line that made the node."""

    op: str
    message: str
    location: str | None


class StepRecords:
    """The records of the step, in order, and the names of its modules."""

    def __init__(self, path: Path) -> None:
        table = pq.read_table(path)
        info = RunInfo.from_json(table.schema.metadata[METADATA_KEY], str(path))
        self._kinds = {module.name: module.type for module in info.modules}
        self._roots = {module.name for module in info.modules if module.root}
        self._records = [Record(**row) for row in table.to_pylist()]

    def input(self) -> Part:
        """Return whether the model's inputs, weights and buffers were finite before the forward."""
        return _part(self._first(lambda r: r.phase == "input" and not looks_like_mask(r)))

    def forward(self, *, goes_bad: bool) -> Part:
        """Return whether the forward was finite.

        Infinities inside are no failure as long as nothing comes of them (a mask before a softmax); ``goes_bad``
        says that the loss or a gradient was not finite.
        """

        def is_bad(record: Record) -> bool:
            if record.phase != "forward" or record.tensor not in ("input", "output"):
                return False
            if record.nan_count:
                return True
            leaves = record.tensor == "output" and record.module in self._roots
            return (leaves or goes_bad) and not looks_like_mask(record)

        return _part(self._first(is_bad))

    def loss(self) -> Part | None:
        """Return whether the loss was finite, None where none was seen."""
        if not any(record.phase == "loss" and record.op is None for record in self._records):
            return None
        return _part(self._first(lambda r: r.phase == "loss"))

    def gradients(self, anomaly: Anomaly | None) -> Part:
        """Return whether all gradients were finite."""
        first = self._first(lambda r: r.phase == "backward" and r.tensor in _BACKWARD)
        if anomaly is None:
            return _part(first)
        return Part("not finite", first, None, anomaly.op, anomaly.location, anomaly.message)

    def _first(self, is_bad: Callable[[Record], bool]) -> str | None:
        """Return the first non-finite record for which ``is_bad`` holds, in words."""
        record = next((r for r in self._records if r.nonfinite_count and r.op is None and is_bad(r)), None)
        return None if record is None else f"{self._place(record)}{_counts(record)}"

    def _place(self, record: Record) -> str:
        if record.tensor == "loss":
            return f"loss {record.path}: " if record.path else ""
        if record.tensor in (*_STATES, "grad"):
            words = {"param": "parameter", "buffer": "buffer", "grad": "gradient of"}[record.tensor]
            return f"{words} {record.module}.{record.path}: " if record.module else f"{words} {record.path}: "
        kind = self._kinds.get(record.module or "", "")
        module = f"{record.module} ({kind})" if record.module else f"(root) {kind}"
        return f"{module}, {record.tensor} {record.path}: "


def _part(bad: str | None) -> Part:
    return Part("finite") if bad is None else Part("not finite", bad)


def _counts(record: Record) -> str:
    counts = (record.nan_count or 0, record.posinf_count or 0, record.neginf_count or 0)
    return counts_in_words(counts, record.numel or 0)


def counts_in_words(counts: Iterable[int], numel: int) -> str:
    """Return how many elements are NaN, +Inf and -Inf, as in ``16 nan of 128``."""
    found = [f"{count} {name}" for count, name in zip(counts, ("nan", "inf", "-inf"), strict=True) if count]
    return f"{', '.join(found)} of {numel}" if numel > 1 else "".join(found).removeprefix("1 ")


def in_short(names: Iterable[str], most: int = 5) -> str:
    """Return names joined by commas, the first few of many."""
    known: Sequence[str] = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more
