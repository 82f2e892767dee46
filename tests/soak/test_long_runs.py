"""Long trainings, recorded: memory, cost, files and handles stay what they are, and what is read in the end is right.

Each training runs in a process of its own, with the garbage collector off (``long_training.py``).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradtrace
from tests.documentation import ROOT

STEPS = 200_000
LARGE_STEPS = 500
MIB = 2**20
MB = 10**6

FLAT = 24 * MIB
"""What resident memory may grow by in the second half of a run. It is the allocators' room to breathe: parts are read
and written anew in the background. What is in use, of Python's and of Arrow's, is held to more closely."""
BLOCKS = 5_000
"""How many more of Python's blocks of memory may be in use in the end than half way, of a million."""
GROWTH = 1.1
"""How many times as long as in the fifth tenth of a run a step may take in the last one."""
THINNING = 1.3
"""The same for the first tenth, in which nothing is thinned yet: that is done in the background, and has its price."""


def train(folder: Path, model: str, steps: int, bad: int, **options: Any) -> dict[str, Any]:
    """Have a training recorded and return what it has measured."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.long_training"]
    command += [str(folder), model, str(steps), str(bad), json.dumps(options)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    measured: dict[str, Any] = json.loads((folder / "measured.json").read_text())
    return measured


def ask(*arguments: str) -> tuple[str, float]:
    """Run a command of gradtrace's; return what it prints and the seconds that it took."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "gradtrace", *arguments], check=True, capture_output=True, text=True)
    return done.stdout, time.perf_counter() - start


def cost_of_steps(measured: dict[str, Any]) -> list[float]:
    """Return for each tenth of a run the median step as a multiple of the machine's own speed in that tenth."""
    times, machine = measured["times"], measured["machine"]
    tenths = [
        statistics.median(times[len(times) * n // 10 : len(times) * (n + 1) // 10])
        / statistics.median(machine[len(machine) * n // 10 : len(machine) * (n + 1) // 10])
        for n in range(10)
    ]
    return [tenth / tenths[0] for tenth in tenths]


def check_that_nothing_grows(measured: dict[str, Any], max_size: int) -> dict[str, Any]:
    """Assert what holds of every long run, and return the numbers for the page."""
    samples = measured["samples"]
    half = len(samples) // 2
    settled, last = samples[half - 10 : half + 10], samples[-20:]
    rss_grew = max(s["rss"] for s in last) - max(s["rss"] for s in settled)
    costs = cost_of_steps(measured)
    largest = max(sample["disk"] for sample in samples)
    # Parts of the file that is being written come and go; all else is there as often as it was.
    kinds = {kind for sample in (*settled, *last) for kind in sample["live"]} - {"_Part", "Plan", "Thinned"}
    before = {kind: max(sample["live"].get(kind, 0) for sample in settled) for kind in kinds}
    after = {kind: min(sample["live"].get(kind, 0) for sample in last) for kind in kinds}
    grown = {kind: (before[kind], after[kind]) for kind in sorted(kinds) if after[kind] > before[kind]}
    assert grown == {}
    assert max(s["live"].get("_Part", 0) for s in last) <= 300
    assert max(s["blocks"] for s in last) - max(s["blocks"] for s in settled) <= BLOCKS
    assert min(s["arrow"] for s in last) <= max(s["arrow"] for s in settled)
    assert rss_grew <= FLAT
    assert costs[-1] / costs[4] <= GROWTH
    assert costs[-1] <= THINNING
    assert largest <= max_size and measured["file"] <= max_size
    assert {s["files"] - measured["before"]["files"] for s in samples} <= {1, 2, 3, 4, 5}
    assert {s["threads"] for s in samples} <= {1, 2}
    assert measured["after"] == measured["before"]
    return {
        "resident_MiB_half_way": max(s["rss"] for s in settled) / MIB,
        "resident_MiB_at_the_end": max(s["rss"] for s in last) / MIB,
        "step_of_the_last_tenth_to_the_fifth": costs[-1] / costs[4],
        "step_of_the_last_tenth_to_the_first": costs[-1],
        "step_ms_median": 1000 * statistics.median(measured["times"]),
        "largest_MB_on_disk_while_recording": largest / MB,
        "MB_of_the_file": measured["file"] / MB,
        "open_files_and_threads_left": 0,
    }


def series_of(measured: dict[str, Any]) -> dict[str, list[float]]:
    """Return what is plotted."""
    samples, times = measured["samples"], measured["times"]
    starts = [0, *(sample["step"] for sample in samples[:-1])]
    medians = [
        1000 * statistics.median(times[start : sample["step"]]) for start, sample in zip(starts, samples, strict=True)
    ]
    return {
        "step": [sample["step"] for sample in samples],
        "resident_MiB": [sample["rss"] / MIB for sample in samples],
        "step_ms": medians,
        "disk_MB": [sample["disk"] / MB for sample in samples],
    }


def check_what_is_read(folder: Path, steps: int, bad: int) -> dict[str, float]:
    """Assert that the recording says what the script has seen; return the seconds that each command took."""
    run = str(folder / "run.parquet")
    seen = array("d")
    seen.frombytes((folder / "losses.bin").read_bytes())
    with gradtrace.open_run(run) as opened:
        rows = opened.sql("select step, nan_count, min from records where tensor = 'loss' order by seq").rows
        around = opened.sql(
            f"select step, count(*) from records where step between {bad - 5} and {bad + 5} and tensor = 'grad'"
            " and phase = 'backward' group by step order by step"
        ).rows
    assert [row[0] for row in rows] == list(range(steps))
    assert [row[0] for row in rows if row[1]] == [bad]
    assert [row[2] for row in rows if not row[1]] == [loss for step, loss in enumerate(seen) if step != bad]
    assert bad in [step for step, _ in around]
    found, seconds = ask("first-nan", run, "--json")
    verdict = json.loads(found)
    assert (verdict["found"], verdict["step"], verdict["phase"]) == (True, bad, "input")
    assert (verdict["run"]["steps"], verdict["run"]["end"]) == (steps, "completed")
    assert all("were thinned to save space" in line for line in verdict["run"]["missing"])
    summary, to_sum_up = ask("summary", run, "-f", "json")
    root = json.loads(summary)[0]
    assert root["module"] == "" and root["calls"] >= steps
    _, to_check = ask("check", run, "-f", "json")
    _, to_report = ask("report", run, "-o", str(folder / "report.html"))
    assert (folder / "report.html").stat().st_size < 20 * MB
    counted, to_query = ask("sql", run, "select count(distinct step) as n from records", "-f", "csv")
    assert counted.split() == ["n", str(steps)]
    return {"first-nan": seconds, "summary": to_sum_up, "check": to_check, "report": to_report, "sql": to_query}


@pytest.mark.parametrize(
    ("mode", "max_size"), [("full", 20 * MB), ("full", 2000 * MB), ("watch", 20 * MB)], ids=["thinned", "full", "watch"]
)
def test_200000_steps_of_a_small_model(tmp_path: Path, result: Callable[..., None], mode: str, max_size: int) -> None:
    bad = 3 * STEPS // 10
    measured = train(tmp_path, "small", STEPS, bad, mode=mode, max_size=max_size)
    numbers = check_that_nothing_grows(measured, max_size)
    assert measured["garbage"]["own"].get("Tensor", 0) == 0
    seconds = check_what_is_read(tmp_path, STEPS, bad)
    what = {"full": "every step captured in full", "watch": "watched"}[mode]
    title = f"A small MLP trained with Adam and a schedule, {what}, --max-size {max_size // MB} MB, without the garbage"
    title += " collector; one bad batch on the way; every loss read back bit for bit"
    result(title, steps=STEPS, **numbers, seconds_to_answer=seconds, series=series_of(measured))


def test_2000_modules_for_500_steps(tmp_path: Path, result: Callable[..., None]) -> None:
    bad, max_size = 3 * LARGE_STEPS // 10, 40 * MB
    measured = train(tmp_path, "large", LARGE_STEPS, bad, max_size=max_size)
    numbers = check_that_nothing_grows(measured, max_size)
    seconds = check_what_is_read(tmp_path, LARGE_STEPS, bad)
    title = "A model of 2,000 modules, every step captured in full, --max-size 40 MB, without the garbage collector"
    result(title, modules=2000, steps=LARGE_STEPS, **numbers, seconds_to_answer=seconds, series=series_of(measured))
