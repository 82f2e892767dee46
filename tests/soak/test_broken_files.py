"""Thousands of broken recordings and capsules, each read in a child of its own limits: no crash, no hang, no traceback.

The quick ones of the same kind, with what is said of each, are in ``tests/analysis/test_broken_files.py`` and
``tests/capture/test_broken_capsules.py``.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from gradtrace.analysis.run import open_run
from gradtrace.capture.recheck.capsule import load, save
from gradtrace.capture.recheck.contents import capsule_of
from gradtrace.errors import CapsuleError
from gradtrace.trace.runinfo import METADATA_KEY
from gradtrace.trace.schema import COLUMNS, EVENTS, PHASES, TENSORS
from gradtrace.trace.seal import seal
from tests.broken import Mutation, answers, finished, in_pieces, mutated, of_two_ranks, questions, rows_in
from tests.failing_step import keep

AT_ONCE = 25
"""So many are read by one child."""

SECONDS = 120
MEMORY = 6 * 2**30
KINDS = ("flip", "set", "zero", "splice", "cut", "double")

Break = tuple[int, Mutation]
"""The number of a file, and what becomes of it."""


def some_breaks(count: int, files: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Break]:
    draw = random.Random(seed)
    return [
        (draw.randrange(files), (draw.choice(kinds), draw.random(), draw.random(), draw.randrange(256)))
        for _ in range(count)
    ]


def in_children(breaks: Sequence[Break], read: Callable[[Break], str]) -> Counter[str]:
    """Let children read what is broken so; count what came of it, by the first word of what ``read`` returns."""
    counts: Counter[str] = Counter()
    for start in range(0, len(breaks), AT_ONCE):
        batch = breaks[start : start + AT_ONCE]
        outcomes, status = _in_child(batch, read)
        bad = [(one, words) for one, words in zip(batch, outcomes, strict=False) if words.startswith("Traceback")]
        assert not bad, bad[0]
        assert status == 0, f"the child ended with {status} at {batch[len(outcomes)]}"
        counts.update(words.split()[0] for words in outcomes)
    assert counts.total() == len(breaks)
    return counts


def _in_child(batch: Sequence[Break], read: Callable[[Break], str]) -> tuple[list[str], int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _read_all(batch, read, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        outcomes = [json.loads(line) for line in pipe]
    return outcomes, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _read_all(batch: Sequence[Break], read: Callable[[Break], str], writer: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the test's own limit
    faulthandler.disable()
    try:
        for one in batch:
            signal.alarm(SECONDS)
            try:
                words = read(one)
            except BaseException:
                words = traceback.format_exc()
            os.write(writer, json.dumps(words).encode() + b"\n")
    finally:
        os._exit(0)


class _Broken:
    """A recording that is copied and broken again and again; ``files`` are the names of its files."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.whole = whole
        self.copy = folder / "broken" / whole.name
        names = [path for path in whole.rglob("*") if path.is_file()] if whole.is_dir() else [whole]
        self.files = sorted(path.relative_to(whole) for path in names if path.stat().st_size)
        with open_run(whole) as run:
            self.rows = rows_in(run)

    def broken(self, one: Break) -> bool:
        """Make the copy; return whether it differs from the whole."""
        number, how = one
        shutil.rmtree(self.copy.parent, ignore_errors=True)
        self.copy.parent.mkdir(parents=True)
        if self.whole.is_dir():
            shutil.copytree(self.whole, self.copy)
        else:
            shutil.copy(self.whole, self.copy)
        path = self.copy / self.files[number] if self.whole.is_dir() else self.copy
        data = path.read_bytes()
        path.write_bytes(mutated(data, how))
        return path.read_bytes() != data

    def read(self, one: Break) -> str:
        """Read the copy: what there is was written, and what is missing is said."""
        differs = self.broken(one)
        refused = answers(self.copy, {"rows": rows_in, "first_nan": lambda run: run.first_nan().to_dict()})
        if refused:
            assert differs and refused.keys() == {"open"}, refused
            return "refused"
        with open_run(self.copy) as run:
            rows = rows_in(run)
            if rows == self.rows:
                return "whole"
            assert set(rows) <= set(self.rows)
            assert run.damage, f"{len(rows)} rows of {len(self.rows)} and not a word"
            return "rest"


def test_what_is_read_of_a_broken_recording_was_written_and_what_is_missing_is_said(
    tmp_path: Path, result: Callable[..., None]
) -> None:
    whole = {
        "finished": finished(tmp_path / "one" / "run.parquet"),
        "pieces": in_pieces(tmp_path / "two" / "run.parquet"),
        "ranks": of_two_ranks(tmp_path / "three" / "run.parquet"),
    }
    counts: Counter[str] = Counter()
    for seed, path in enumerate(whole.values()):
        broken = _Broken(path, tmp_path)
        counts += in_children(some_breaks(500, len(broken.files), seed), broken.read)
    assert counts["refused"] and counts["rest"]
    result(
        f"{counts.total():,} recordings with flipped bits, zeroed and spliced stretches, cut off, doubled",
        **{f"{what}": counts[what] for what in ("refused", "rest", "whole")},
        wrong_numbers=0,
        crashes=0,
        tracebacks=0,
    )


def test_a_file_whose_checksums_fit_its_damage_crashes_nothing(tmp_path: Path, result: Callable[..., None]) -> None:
    """What a hostile file does to those that decode it: every question is asked."""
    good = finished(tmp_path / "good.parquet")
    data = good.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    sums = int.from_bytes(data[footer - 12 : footer - 8], "little")
    bare = data[: footer - 12 - 4 * sums] + data[footer:]
    asked = questions(str(good))
    path = tmp_path / "forged.parquet"

    def read(one: Break) -> str:
        path.write_bytes(mutated(bare, one[1]))
        with suppress(OSError, ValueError, MemoryError, struct.error):  # it has no footer any more
            seal(path)
        return "refused" if answers(path, asked) else "answered"

    counts = in_children(some_breaks(400, 1, 7, ("flip", "set", "zero", "splice")), read)
    assert counts["refused"] and counts["answered"]
    result(
        f"{counts.total()} files with damage that their checksums know nothing of, {len(asked)} questions to each",
        refused=counts["refused"],
        answered=counts["answered"],
        crashes=0,
        tracebacks=0,
    )


STRANGE: dict[str, list[Any]] = {
    "int32": [-1, 0, 7, 2**31 - 1, -(2**31)],
    "int64": [-1, 0, 7, 2**53, 2**63 - 1, -(2**63), None],
    "double": [0.0, -0.0, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan, None],
    "timestamp[us, tz=UTC]": [datetime(1, 1, 2, tzinfo=timezone.utc), datetime(9999, 1, 1, tzinfo=timezone.utc), None],
    "string": [
        *PHASES,
        *TENSORS,
        *EVENTS,
        "",
        ".",
        "..",
        "a..b",
        "[1]",
        "[[[",
        "\0",
        "\x1b[31m",
        "x" * 3000,
        "head",
        None,
    ],
}
FACTS: list[Any] = [None, True, -1, 2**40, 2**62, 1.5, "", "x", "\0", "\ud800", "[1, 2]", "completed", "running"]
FACTS += [[], {}, [1], ["x"], {"x": 1}, {"x": "y"}, {"every": 2}, "tracer failed: x", "a" * 20_000]


def test_values_and_facts_that_nobody_wrote_are_refused_or_taken(tmp_path: Path, result: Callable[..., None]) -> None:
    """What is no damage: a file that is well made, of columns and facts that contradict each other and themselves."""
    good = finished(tmp_path / "good.parquet")
    table, path = pq.read_table(good), tmp_path / "strange.parquet"
    rows, facts = table.to_pylist(), table.schema.metadata[METADATA_KEY]
    asked = questions(str(good))

    def read(one: Break) -> str:
        draw = random.Random(repr(one))
        changed = [dict(row) for row in rows]
        for _ in range(draw.choice([0, 1, 3, 30])):
            column = draw.choice(COLUMNS)
            draw.choice(changed)[column.name] = draw.choice(STRANGE[column.type])
        said = json.loads(facts)
        for _ in range(draw.choice([0, 1, 2])):
            where = said if draw.random() < 0.6 else said["modules"][0] if isinstance(said["modules"], list) else said
            where[draw.choice(sorted(where))] = draw.choice(FACTS)
        strange = pa.Table.from_pylist(changed, schema=table.schema)
        pq.write_table(strange.replace_schema_metadata({METADATA_KEY: json.dumps(said)}), path)
        return "refused" if answers(path, asked) else "answered"

    counts = in_children(some_breaks(400, 1, 11), read)
    assert counts["refused"] and counts["answered"]
    result(
        f"{counts.total()} files whose values and facts contradict each other, {len(asked)} questions to each",
        refused=counts["refused"],
        answered=counts["answered"],
        tracebacks=0,
    )


def test_a_broken_capsule_is_refused_or_the_same(tmp_path: Path, result: Callable[..., None]) -> None:
    whole = tmp_path / "run.capsule.pt"
    facts: dict[str, Any] = {"step": 3, "micro_step": 0, "boundary": "", "phase": "backward", "number": 0}
    save(whole, capsule_of(keep(nn.Linear(3, 2), torch.randn(4, 3)), **facts), 2**30)
    data, weights = whole.read_bytes(), load(whole).root.weights
    path = tmp_path / "broken.capsule.pt"

    def read(one: Break) -> str:
        path.write_bytes(mutated(data, one[1]))
        try:
            found = load(path)
        except CapsuleError as error:
            assert str(error).isprintable()
            return "refused"
        assert all(torch.equal(weights[name], weight) for name, weight in found.root.weights.items())
        return "whole"

    counts = in_children(some_breaks(3000, 1, 9), read)
    assert counts["refused"]
    result(f"{counts.total():,} broken capsules", **counts, crashes=0, tracebacks=0)


@pytest.mark.parametrize("how", ["hang", "crash", "memory"])
def test_what_would_be_found_is_found(how: str) -> None:
    """A reader that hangs, crashes or takes all memory does not pass."""

    def read(one: Break) -> str:
        if how == "hang":
            signal.alarm(1)
            signal.pause()
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        return str(len(bytearray(2 * MEMORY)))

    with pytest.raises(AssertionError, match="MemoryError" if how == "memory" else "the child ended with -1[14]"):
        in_children(some_breaks(3, 1, 1), read)
