"""A recording of a million modules, asked every question by a process that may take so much memory and time.

The recording is made by gradtrace's own writer, from columns: a real model of a million modules would measure torch.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from gradtrace.trace.arrow import ARROW_SCHEMA
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.writer import RunWriter

MODULES = 1_000_000
STEPS = 2
FAILING = "layers.4545.experts.4.part4"
"""About in the middle of the model; what lies behind it has NaN in its gradient and parameter of the last step."""
TENSORS = (("output", "forward", "0"), ("grad", "backward", "weight"), ("param", "optimizer", "weight"))
GIB = 2**30
MEMORY = 16 * GIB
"""Bytes of address space that is not a file's, of which a good part is only reserved."""
CPU_SECONDS = {"first-nan": 120, "summary": 120, "sql": 120, "check": 120, "report": 300, "diff": 300, "export": 300}
"""What is quadratic in the modules would take hours; what the commands do take stands in the result."""


class Answer(NamedTuple):
    """What a command said, and what it took."""

    stdout: str
    stderr: str
    cpu_seconds: float
    peak_gib: float


def names() -> list[str]:
    """Return the root and modules in blocks of 101, three levels deep."""
    there = [""]
    for layer in range(MODULES // 101 + 1):
        there.append(f"layers.{layer}")
        for expert in range(10):
            there.append(f"layers.{layer}.experts.{expert}")
            there += [f"layers.{layer}.experts.{expert}.part{part}" for part in range(9)]
    return there[:MODULES]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the recording."""
    path = tmp_path_factory.mktemp("million") / "run.parquet"
    there = names()
    info = RunInfo("million", command=["train.py"], modules=[_module(name) for name in there])
    writer = RunWriter(path, info, existing="overwrite", max_bytes=None)
    random = np.random.default_rng(0)
    for step in range(STEPS):
        for number, tensor in enumerate(TENSORS):
            writer.write(_batch(there, step, (step * len(TENSORS) + number) * MODULES, tensor, random))
    info.end, info.steps, info.captured, info.last_step = "completed", STEPS, STEPS, STEPS - 1
    info.incidents, info.records = 1, STEPS * len(TENSORS) * MODULES
    writer.finish(info)
    return path


def _module(name: str) -> ModuleInfo:
    shapes = {"weight": "[4, 4]"} if name else {}
    kind = "Linear" if name else "Net"
    return ModuleInfo(name, kind, not name, name.count(".") + bool(name), "train.py", 3, shapes, calls=STEPS)


def _batch(
    there: list[str], step: int, seq: int, of: tuple[str, str, str], random: np.random.Generator
) -> pa.RecordBatch:
    """Return a row for each module: one tensor's, of one step."""
    tensor, phase, path = of
    norm = np.abs(random.normal(size=MODULES)).astype(np.float32).astype(float)
    bad = np.zeros(MODULES, np.int64)
    first = there.index(FAILING)
    if step == STEPS - 1:
        bad[first : first + 1 if tensor == "output" else MODULES] = 1
    numbers = np.arange(MODULES, dtype=np.int32)
    values = {
        "seq": pa.array(np.arange(seq, seq + MODULES)),
        "module": pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(there)),
        "nan_count": pa.array(bad),
        "min": pa.array(-norm),
        "max": pa.array(norm),
        "norm": pa.array(2 * norm),
    }
    same = {
        "rank": 0, "step": step, "micro_step": 0, "time": step * 10**6, "phase": phase, "call": 0, "tensor": tensor,
        "path": path, "dtype": "float32", "shape": "[4, 4]", "device": "cpu", "numel": 16, "posinf_count": 0,
        "neginf_count": 0,
    }  # fmt: skip
    columns = [
        values[field.name].cast(field.type) if field.name in values else _repeated(same.get(field.name), field.type)
        for field in ARROW_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


def _repeated(value: object, kind: pa.DataType) -> pa.Array:
    if value is None:
        return pa.nulls(MODULES, kind)
    if not pa.types.is_dictionary(kind):
        return pa.repeat(pa.scalar(value, kind), MODULES)
    zeros = pa.array(np.zeros(MODULES, np.int32)).cast(kind.index_type)
    return pa.DictionaryArray.from_arrays(zeros, pa.array([value], kind.value_type))


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Answer]:
    """Give a function that runs a command, of so much memory and processor time at most; it has to succeed."""

    def limit(cpu_seconds: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))

    def run_it(command: str, *arguments: object) -> Answer:
        words = [sys.executable, "-m", "gradtrace", command, *map(str, arguments)]
        out, err = tmp_path / "stdout", tmp_path / "stderr"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                words, stdout=stdout, stderr=stderr, preexec_fn=lambda: limit(CPU_SECONDS[command])
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, (command, process.returncode, err.read_text()[-2000:])
        answer = Answer(out.read_text(), err.read_text(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / GIB)
        print(command, f"{answer.cpu_seconds:.1f} s, {answer.peak_gib:.2f} GiB")
        return answer

    return run_it


def test_a_million_modules_are_no_obstacle_to_any_command(
    run: Path, tmp_path: Path, ask: Callable[..., Answer], result: Callable[..., None]
) -> None:
    first = names().index(FAILING)
    behind = MODULES - first
    answers: dict[str, Answer] = {}

    answers["first-nan"] = ask("first-nan", run, "--json")
    assert _first_nan(answers["first-nan"]) == (FAILING, STEPS - 1, "output", behind)

    answers["summary"] = ask("summary", run)
    assert f"{MODULES:,} modules" in answers["summary"].stdout
    assert len(answers["summary"].stdout.splitlines()) < 1_100
    assert "the first 1,000 of 1,000,000 rows" in answers["summary"].stderr

    query = f"""
        SELECT count(DISTINCT module), count(*), count(*) FILTER (WHERE nan_count > 0),
            count(*) FILTER (WHERE nan_count > 0 AND module = '{FAILING}')
        FROM records"""
    answers["sql"] = ask("sql", run, query, "-f", "csv")
    assert answers["sql"].stdout.splitlines()[1] == f"{MODULES},{STEPS * 3 * MODULES},{1 + 2 * behind},3"

    answers["check"] = ask("check", run)
    assert "too few steps for some rules" in answers["check"].stderr

    page = tmp_path / "report.html"
    answers["report"] = ask("report", run, "-o", page)
    assert "1,000,000 modules are too many for a page: 10,000 are shown" in answers["report"].stderr
    assert f'"{FAILING}"' in page.read_text(encoding="utf-8")

    answers["diff"] = ask("diff", run, run, "--json")
    assert _compared(answers["diff"]) == (STEPS * 3 * MODULES, 0)

    answers["export"] = ask("export", run, "--tensorboard", tmp_path / "board")
    # Of each module the norms of output, gradient and parameter and the largest output; a count of NaN where there is
    # one; the norm of all gradients and the count of all NaN.
    curves = 4 * MODULES + behind + 2
    assert f"{STEPS} steps, {curves:,} curves, {STEPS * curves:,} points" in answers["export"].stderr

    result(
        "1,000,000 modules in one recording, each command a process of its own",
        modules=MODULES,
        records=STEPS * 3 * MODULES,
        file_mb=run.stat().st_size / 1e6,
        report_mb=page.stat().st_size / 1e6,
        **{f"{_word(command)}_cpu_seconds": answer.cpu_seconds for command, answer in answers.items()},
        **{f"{_word(command)}_peak_gib": answer.peak_gib for command, answer in answers.items()},
    )


def _first_nan(answer: Answer) -> tuple[str, int, str, int]:
    """Return module, step and tensor of the verdict, and how many gradients it reached."""
    verdict = json.loads(answer.stdout)
    return verdict["module"], verdict["step"], verdict["tensor"], verdict["affected"]["grads"]


def _compared(answer: Answer) -> tuple[int, int]:
    """Return how many records were compared, and how many of them differ."""
    difference = json.loads(answer.stdout)
    return difference["compared"], difference["differing"]


def _word(command: str) -> str:
    return command.replace("-", "_")
