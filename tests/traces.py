"""Traces for tests: literal rows in, a run on disk out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter


def write_run(path: str | os.PathLike[str], records: Iterable[Record], *, steps_at_once: int = 1, **info: Any) -> Path:
    """Write a finished run of the records, a batch every ``steps_at_once`` steps, and return its path.

    ``info`` are fields of ``RunInfo``; ``end``, ``steps`` and ``last_step`` follow from the records unless
    given. With ``world_size`` above 1 the path is the directory of the ranks.
    """
    rows = sorted(records, key=lambda record: record.seq)
    steps = {record.step for record in rows}
    facts = {"run_id": "test", "steps": len(steps), "last_step": max(steps, default=None)} | info
    writer = RunWriter(path, RunInfo(**facts))
    for _, step in groupby(rows, key=lambda record: record.step // steps_at_once):
        writer.write(batch_of_records(step))
    writer.finish(RunInfo(**({"end": "completed"} | facts)))
    return writer.run_path
