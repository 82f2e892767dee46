"""Which steps matter: one step's records in, incidents out.

Pure rules, shared by the capture, which asks them as the run goes, and by the analysis, which asks them of
the file. An incident starts with the first step in which something that matters is non-finite and ends at the
first later step that is finite throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from gradtrace.trace.schema import Record

SKIPS_IN_A_ROW = 10
"""So many steps skipped one after the other are an incident (GradScaler's start-up needs a handful)."""

SMALLEST_LOSS_SCALE = 1.0
"""A loss scale below this no longer helps: the gradients overflow on their own."""

DETACHED = "no gradient flows back from here"
"""What is noted of the output of a root without weights that is only looked at: a metric."""

NO_GRADIENT = "it had no gradient"
"""What is noted of a parameter that is non-finite after an update in a step that was only watched."""

_FEWEST_EQUAL = 2
"""So many equal finite elements make a mask; a single one is equal to itself and proves nothing."""

_Counts = tuple[int, int, int]
_Key = tuple[int, str | None, str, str]


def looks_like_mask(row: Record) -> bool:
    """Whether the record holds infinities of one sign beside finite elements that are all equal."""
    if row.nan_count or bool(row.posinf_count) == bool(row.neginf_count):
        return False
    finite = (row.numel or 0) - row.nonfinite_count
    return finite >= _FEWEST_EQUAL and row.min is not None and row.min == row.max


@dataclass
class Incident:
    """Consecutive steps in which something that matters was non-finite.

    ``reached`` says what went non-finite, in the order in which it was seen: output, loss, grad, buffer,
    param, skips. ``ended`` is true when a later step was finite throughout.
    """

    first_step: int
    last_step: int
    reached: list[str] = field(default_factory=list)
    ended: bool = False


class IncidentFinder:
    """Finds incidents in a run that is handed over step by step, in order."""

    def __init__(self, roots: Collection[str]) -> None:
        """``roots`` are the names of the outermost modules; it may grow while steps come in."""
        self.incidents: list[Incident] = []
        self._roots = roots
        self._baseline: dict[_Key, _Counts] = {}
        self._skips: list[int] = []

    def add_step(self, step: int, records: Iterable[Record], *, skipped: bool = False) -> bool:
        """Take one step; return whether something that matters was non-finite in it.

        ``records`` need to hold the step's non-finite records of outputs, losses, gradients, buffers and
        parameters, and its loss scales; others are passed over. ``skipped`` is true when GradScaler skipped
        the optimizer's step.
        """
        reached = list(dict.fromkeys(self._reached(records, skipped)))
        self._skips = [*self._skips, step] if skipped else []
        first = step
        if len(self._skips) >= SKIPS_IN_A_ROW and not reached:
            reached, first = ["skips"], self._skips[0]
        if reached or not skipped:  # a skipped step is not finite throughout: it ends nothing
            self._note(first, step, reached)
        return bool(reached)

    def reached_before_update(self, records: Iterable[Record], *, skipped: bool = False) -> list[str]:
        """Return which of output, loss and grad matter in a step whose optimizer has not stepped yet; notes nothing."""
        seen = (record for record in records if record.tensor in ("output", "loss", "grad"))
        return list(dict.fromkeys(self._reached(seen, skipped)))

    def _note(self, first: int, step: int, reached: list[str]) -> None:
        current = self.incidents[-1] if self.incidents and not self.incidents[-1].ended else None
        if not reached:
            if current is not None:
                current.ended = True
        elif current is None:
            self.incidents.append(Incident(first, step, reached))
        else:
            current.last_step = step
            current.reached += [what for what in reached if what not in current.reached]

    def _reached(self, records: Iterable[Record], skipped: bool) -> Iterable[str]:
        for record in sorted(records, key=lambda r: r.seq):
            if record.tensor == "loss_scale":
                if record.max is not None and record.max < SMALLEST_LOSS_SCALE:
                    yield "skips"
            elif record.nonfinite_count and self._matters(record, skipped):
                yield record.tensor

    def _matters(self, record: Record, skipped: bool) -> bool:
        if record.tensor in ("param", "buffer"):
            return self._became_nonfinite(record)
        if record.tensor == "grad":
            return not skipped
        if record.tensor == "loss":
            # A skipped step's Inf is the loss scale's doing; a NaN is not.
            return bool(record.nan_count) or not skipped
        is_root_output = record.tensor == "output" and record.module in self._roots
        counts = record.phase != "recompute" and record.detail != DETACHED
        return is_root_output and counts and bool(record.nan_count)

    def _became_nonfinite(self, record: Record) -> bool:
        """Whether a parameter or buffer holds more non-finite elements than it started with.

        A mask that is registered in the middle of the run has no start to be compared with.
        """
        if record.tensor == "buffer" and record.neginf_count and looks_like_mask(record):
            return False
        counts = (record.nan_count or 0, record.posinf_count or 0, record.neginf_count or 0)
        key = (record.rank, record.module, record.tensor, record.path)
        if record.phase == "input":
            self._baseline[key] = counts
            return False
        start = self._baseline.get(key, (0, 0, 0))
        return any(now > then for now, then in zip(counts, start, strict=True))
