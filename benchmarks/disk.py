"""What a recording takes on disk, and how long the writer takes, a step.

    python -m benchmarks.disk --steps 100

Time in the writer is what ``RunWriter.write`` takes from the training thread; beside it stands the processor time of
gradtrace's own threads, which turn rows into Parquet meanwhile, and what ``stop`` takes in the end, once a run. Bytes
are those of the finished file.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.machine import machine
from benchmarks.models import MODELS, TITLES, make
from benchmarks.pairs import in_a_line
from benchmarks.tables import table
from benchmarks.variants import recording, scratch
from gradtrace.trace.writer import RunWriter

MODES: dict[str, dict[str, Any]] = {"full": {}, "every10": {"every": 10}, "watch": {"mode": "watch"}}
SETTLED = 2
"""Steps that are recorded and not timed: the first one also has the state that the run starts with."""


class Recorded(NamedTuple):
    """Of one run: what it has in all, milliseconds of a step and in the writer, and seconds that the end took."""

    steps: int
    records: int
    size: int
    step: float
    writing: float
    behind: float
    end: float


@contextmanager
def time_in_writer() -> Iterator[list[float]]:
    """Give a list that gets the seconds of each call of ``RunWriter.write``."""
    times: list[float] = []
    write = RunWriter.write

    def timed(writer: RunWriter, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        write(writer, *args, **kwargs)
        times.append(time.perf_counter() - start)

    with mock.patch.object(RunWriter, "write", timed):
        yield times


def seconds_of_own_threads() -> float:
    """Return the processor time that gradtrace's threads have used."""
    own = (thread for thread in threading.enumerate() if thread.name.startswith("gradtrace") and thread.ident)
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in own)


def record(model: str, mode: str, steps: int) -> Recorded:
    """Record so many steps of a model."""
    training = make(model)
    with scratch() as folder, time_in_writer() as times:
        path = folder / "run.parquet"
        with recording(training, path, **MODES[mode]) as tracer:
            for _ in range(SETTLED):
                training.step()
            times.clear()
            start = time.perf_counter()
            for _ in range(steps):
                training.step()
            step = (time.perf_counter() - start) / steps
            writing, behind = sum(times) / steps, seconds_of_own_threads() / steps
            start = time.perf_counter()
        info = tracer.info
        end = time.perf_counter() - start
        return Recorded(info.steps, info.records, path.stat().st_size, 1000 * step, 1000 * writing, 1000 * behind, end)


def row(model: str, mode: str, it: Recorded) -> list[str]:
    """Return a run as a line of the table."""
    return [
        *(TITLES[model], mode, str(it.steps), f"{it.records / it.steps:.0f}", f"{it.size / it.steps:,.0f}"),
        *(f"{it.size / it.records:.1f}", f"{it.step:.2f}", f"{it.writing:.3f}", f"{it.behind:.3f}", f"{it.end:.2f}"),
    ]


def main() -> int:
    """Measure what the command line asks for and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], metavar="MODE")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for model in args.models:
        for mode in args.modes:
            try:
                rows.append(row(model, mode, record(model, mode, args.steps)))
            except Exception as error:
                print(f"{model}, {mode}: {in_a_line(error)}", file=sys.stderr)
    header = ["model", "recording", "steps", "records a step", "bytes a step", "bytes a record", "step (ms)"]
    header += ["in the writer (ms)", "own threads (ms)", "end of the run (s)"]
    print(machine(), table(header, rows), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
