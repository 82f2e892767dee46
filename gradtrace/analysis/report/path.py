"""The way of a failure through the model: finite boundaries, where it was made, where it went, how far it got."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from gradtrace.analysis.verdict_model import Fate, Finding, Verdict
from gradtrace.trace.schema import Record

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

MOST_STOPS = 12
"""Most stops after the one that made it; what lies between the first and the last of them is counted."""

_COLUMNS = ", ".join('NULL AS "time"' if name == "time" else f'"{name}"' for name in Record._fields)
_BY_SEQ = f"""
SELECT {_COLUMNS} FROM records
WHERE rank = $1 AND op IS NULL AND seq BETWEEN list_min($2::BIGINT[]) AND list_max($2::BIGINT[])
AND list_contains($2::BIGINT[], seq)
ORDER BY seq
"""


@dataclass(frozen=True)
class Stop:
    """One stop of the way: records of one module and pass that met the same fate, None for finite ones."""

    records: tuple[Record, ...]
    fate: Fate | None

    @property
    def first(self) -> Record:
        """The first record, which says where and when."""
        return self.records[0]


def failure_path(run: Recording, verdict: Verdict) -> list[Stop | int]:
    """Return the stops in the order in which the run came by them; a number stands for so many that are left out."""
    finding = verdict.finding
    if finding is None:
        return []
    stops = _merged(_records(run, verdict, finding), finding)
    born = next((place for place, stop in enumerate(stops) if stop.fate is Fate.MADE), 0)
    before, after = stops[: born + 1], stops[born + 1 :]
    if len(after) <= MOST_STOPS:
        return [*before, *after]
    head = MOST_STOPS * 2 // 3
    tail = MOST_STOPS - head
    return [*before, *after[:head], len(after) - MOST_STOPS, *after[-tail:]]


def _records(run: Recording, verdict: Verdict, finding: Finding) -> list[Record]:
    seqs = sorted({*finding.fates, finding.row.seq, finding.seen.seq})
    found = run.execute(_BY_SEQ, [finding.row.rank, seqs]).fetchall()
    records = {row.seq: row for row in (*verdict.context, *(Record(*values) for values in found))}
    return [records[seq] for seq in sorted(records)]


def _merged(records: list[Record], finding: Finding) -> list[Stop]:
    def key(row: Record) -> tuple[object, ...]:
        fate = finding.fates.get(row.seq)
        # What is finite, or made, has numbers of its own to show.
        alone = row.seq if fate in (None, Fate.MADE) else None
        return row.step, row.phase, row.module, fate, alone

    groups = [tuple(group) for _, group in groupby(records, key)]
    return [Stop(rows, finding.fates.get(rows[0].seq)) for rows in groups]
