"""Small recordings to be broken, and every question that can be put to one.

A recording has a NaN in its third step, so that a damaged one that seems healthy is found out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gradtrace.analysis.catalog import describe
from gradtrace.analysis.recording import Recording, reading
from gradtrace.analysis.report import report_html
from gradtrace.analysis.run import Run, open_run
from gradtrace.analysis.verdict_text import text
from gradtrace.errors import GradtraceError, QueryError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.journal import Journal
from gradtrace.trace.merging import encode
from gradtrace.trace.parts import journal_file, parts_of
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

STEPS = 5
BAD_STEP = 2
MODULES = [
    ModuleInfo("", "Net", root=True, file="net.py", line=3, calls=STEPS),
    ModuleInfo("head", "Linear", depth=1, parameters={"weight": "[2, 3]", "bias": "[2]"}, calls=STEPS),
]
_PER_STEP = 7

Mutation = tuple[str, float, float, int]
Questions = dict[str, Callable[[Run], Any]]


def records_of(step: int, rank: int = 0) -> list[Record]:
    """One step of a training whose head returns a NaN in step ``BAD_STEP`` and from then on."""
    bad = int(step >= BAD_STEP)
    rows: list[tuple[str, str, str | None, str, int]] = [
        ("input", "input", "", "0", 0),
        ("forward", "output", "head", "0", bad),
        ("forward", "output", "", "0", bad),
        ("loss", "loss", None, "", bad),
        ("backward", "grad", "head", "weight", bad),
        ("optimizer", "lr", None, "0.0", 0),
        ("optimizer", "param", "head", "weight", bad),
    ]
    facts: dict[str, Any] = {"rank": rank, "dtype": "float32", "shape": "[6]", "device": "cpu", "numel": 6, "call": 0}
    return [
        Record(
            step=step,
            seq=_PER_STEP * step + number,
            phase=phase,
            tensor=tensor,
            module=module,
            path=path,
            nan_count=nans,
            posinf_count=0,
            neginf_count=0,
            min=-0.25 * number - step,
            max=0.125 * number + step,
            norm=1.0 + number / 7 + step + rank,
            **facts,
        )
        for number, (phase, tensor, module, path, nans) in enumerate(rows)
    ]


def info_of(rank: int = 0, world_size: int = 1, **more: Any) -> RunInfo:
    """The facts of such a run."""
    facts: dict[str, Any] = {"steps": STEPS, "captured": STEPS, "last_step": STEPS - 1, "command": ["train.py"]}
    facts |= {"modules": MODULES, "rank": rank, "world_size": world_size, "versions": {"torch": "2.13"}} | more
    return RunInfo("test", **facts)


def finished(path: Path, rank: int = 0, world_size: int = 1) -> Path:
    """Write a finished run."""
    writer = RunWriter(path, info_of(rank, world_size))
    for step in range(STEPS):
        writer.write(batch_of_records(records_of(step, rank)))
    writer.finish(info_of(rank, world_size, end="completed"))
    return writer.path


def in_pieces(path: Path, rank: int = 0) -> Path:
    """Write a run that was left in its pieces: a part of two steps, a journal of two, a journal of one."""
    parts = parts_of(path)
    parts.mkdir(parents=True)
    for index, steps in enumerate(((0, 1), (2, 3), (4,))):
        journal = Journal(journal_file(parts, index))
        for step in steps:
            journal.append(batch_of_records(records_of(step, rank)))
        journal.close()
    encode(parts, 0)
    facts = info_of(rank, rank + 1, end="signal SIGTERM", records=STEPS * _PER_STEP)
    (parts / "run.json").write_text(facts.to_json())
    return parts


def of_two_ranks(path: Path) -> Path:
    """Write a finished run of two ranks and return its directory."""
    for rank in range(2):
        finished(path, rank, 2)
    return path


def rows_in(run: Recording) -> list[tuple[Any, ...]]:
    """All rows, in order."""
    with reading(run):
        return run.execute("SELECT * FROM records ORDER BY rank, seq").fetchall()


def questions(good: str) -> Questions:
    """Every question of the Python interface, by name; ``good`` is a run to compare with."""
    return {
        "first_nan": lambda run: (json.dumps(run.first_nan().to_dict(), allow_nan=False), text(run.first_nan())),
        "skipped": lambda run: run.first_nan(skipped=True).to_dict(),
        "summary": lambda run: [str(run.summary(by)) for by in ("module", "type", "step")],  # type: ignore[arg-type]
        "captured": lambda run: (run.captured, repr(run), run._repr_html_()),
        "check": lambda run: str(run.check()),
        "diff": lambda run: (str(run.diff(good)),),
        "diff of good": lambda run: _diff(good, run),
        "sql": lambda run: run.sql("SELECT * FROM records").rows,
        "arrow": lambda run: run.sql("SELECT * FROM steps").arrow(),
        "views": lambda run: [run.sql(f"FROM {view}").rows for view in ("modules", "meta", "events", "grads")],
        "describe": describe,
        "report": report_html,
        "rows": rows_in,
    }


def _diff(good: str, run: Run) -> str:
    with open_run(good) as opened:
        return str(opened.diff(run))


def answers(path: Path | str, asked: Questions) -> dict[str, str]:
    """Put questions to what is at ``path``; return what was refused, and why.

    Everything but an error of gradtrace's own in one line goes through: it is what must not happen.
    """
    refused: dict[str, str] = {}
    try:
        run = open_run(path)
    except GradtraceError as error:
        return {"open": _one_line(error)}
    with run:
        for name, ask in asked.items():
            try:
                ask(run)
            except GradtraceError as error:
                refused[name] = _one_line(error)
    return refused


def _one_line(error: GradtraceError) -> str:
    words = str(error)
    assert isinstance(error, QueryError) or words.isprintable(), words  # DuckDB's own words have several lines
    return words


def mutations() -> st.SearchStrategy[Mutation]:
    """Ways to break a file: bits, bytes, stretches of zeros, a piece of itself, its end."""
    share = st.floats(0, 1, exclude_max=True)
    kinds = st.sampled_from(("flip", "set", "zero", "splice", "cut", "double"))
    return st.tuples(kinds, share, share, st.integers(0, 255))


def mutated(data: bytes, how: Mutation) -> bytes:
    """Return a file's content, broken at a share of its length."""
    kind, at, from_, value = how
    place, source = int(at * len(data)), int(from_ * len(data))
    length = 1 + value
    if kind == "flip":
        return data[:place] + bytes([data[place] ^ 1 << value % 8]) + data[place + 1 :]
    if kind == "set":
        return data[:place] + bytes([value]) + data[place + 1 :]
    if kind == "zero":
        return data[:place] + bytes(len(data[place : place + length])) + data[place + length :]
    if kind == "splice":
        return data[:place] + data[source : source + length] + data[place + length :]
    return data[:place] if kind == "cut" else data[:place] + data[:source]
