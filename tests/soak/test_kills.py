"""Recordings killed over and over, at moments that nobody has chosen: nothing is lost, nothing mixed, nobody hangs."""

from __future__ import annotations

import functools
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from gradtrace_cli.main import main

import gradtrace
from tests.trace.test_background import assert_kept, interrupt

SEED = 8
RUNS = 50
PARTS = "run.parquet.parts"

TRAINING = """
import os
import sys
import torch
from torch import nn

told = os.open(f"told-{sys.argv[1]}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(int(sys.argv[2])):
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    os.write(told, f"{step} {loss.item().hex()}\\n".encode())
    os.fsync(told)
"""
STEPS = 500
# Six Linear, a Tanh and two Sequential. The data has no gradient, so neither the root nor the first layer hands one on.
FULL = {"input": 9, "output": 9, "grad_output": 9, "grad_input": 7, "grad": 12, "param": 12, "loss": 1, "lr": 1}
WATCHED = {"output": 1, "grad_norm": 1, "loss": 1, "lr": 1}


def is_taken(folder: Path, number: int) -> bool:
    """Whether run ``number`` has its place, and not one before it any more."""
    try:
        return f'"{number}", "{STEPS}"' in (folder / PARTS / "run.json").read_text()
    except OSError:
        return False


# Moments that are too short to be struck by chance: what is first seen of them in the directory.
SIGHTS: dict[str, Callable[[Path, int], bool]] = {
    "the place is being taken": lambda folder, number: (folder / f".{PARTS}.tmp").exists(),
    "the place is taken": is_taken,
    "a part is encoded": lambda *run: is_taken(*run) and any(run[0].glob(f"{PARTS}/part-*.tmp")),
    "parts are joined": lambda *run: is_taken(*run) and any(run[0].glob(f"{PARTS}/part-*-*")),
    "pieces are merged": lambda *run: is_taken(*run) and (run[0] / PARTS / "merged.parquet.tmp").exists(),
    "the file is in its place": lambda *run: is_taken(*run) and (run[0] / "run.parquet").exists(),
}


def start(folder: Path, number: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "gradtrace", "record", "--quiet", "--max-size", "500kB", "train.py", str(number)]
    return subprocess.Popen([*words, str(STEPS)], cwd=folder, stderr=subprocess.PIPE)


def kill(process: subprocess.Popen[bytes], after_s: float) -> None:
    time.sleep(after_s)
    process.kill()
    process.wait()


def kill_at_sight(process: subprocess.Popen[bytes], seen: Callable[[], bool], after_s: float) -> bool:
    while process.poll() is None:
        if seen():
            kill(process, after_s)
            return True
        time.sleep(0.0005)
    return False


def told(folder: Path, number: int) -> list[tuple[int, float]]:
    path = folder / f"told-{number}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float.fromhex(loss)) for step, loss in map(str.split, lines)]


def test_fifty_runs_killed_at_random_moments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: Callable[..., None],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    chance = random.Random(SEED)
    began = time.monotonic()
    with start(tmp_path, RUNS) as process:
        assert process.wait() == 0
    whole_s = time.monotonic() - began
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        assert run.info.thinned

    codes: Counter[int] = Counter()
    struck: Counter[str] = Counter()
    for number in range(RUNS):  # all at the default place: each has to deal with what the one before it left
        with start(tmp_path, number) as process:
            if number % 2:
                kill(process, chance.uniform(0, whole_s))
            else:
                name = list(SIGHTS)[number // 2 % len(SIGHTS)]
                seen = functools.partial(SIGHTS[name], tmp_path, number)
                struck[name] += kill_at_sight(process, seen, chance.uniform(0, 0.03))
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
        codes[process.returncode] += 1
    assert set(codes) <= {0, -signal.SIGKILL}

    found = {number: path for path in runs(tmp_path) if (number := number_of(path)) is not None}
    steps = lost = in_flight = 0
    ends: Counter[str] = Counter()
    for number in range(RUNS + 1):
        expected = told(tmp_path, number)
        if number not in found:
            assert not expected
            ends["nothing recorded yet"] += 1
            continue
        with gradtrace.open_run(found[number]) as run:
            ends[run.end] += 1
            losses = run.sql("select step, max from records where tensor = 'loss' order by seq").rows
            assert losses[: len(expected)] == expected
            assert [step for step, _ in losses] == list(range(len(losses)))
            assert len(losses) <= len(expected) + 1
            assert run.end != "killed" or run.missing[-1] == missing(len(losses)) or run.info.thinned
            in_flight += len(losses) - len(expected)
            assert all(rows in (FULL, WATCHED) for rows in rows_by_step(run).values()), number
        steps += len(expected)
        lost += max(len(expected) - len(losses), 0)
        assert main(["first-nan", str(found[number])]) == 0
        assert main(["summary", str(found[number])]) == 0
        output = capsys.readouterr()
        assert "Traceback" not in output.out + output.err
    assert not list(tmp_path.glob("*.parquet*/merged.parquet.tmp"))
    result(
        f"{RUNS} runs killed with SIGKILL at random moments, one after the other at the same place",
        runs=RUNS,
        killed_at_sight_of=dict(struck),
        ended_before_the_kill=codes[0],
        how_they_read=dict(ends),
        steps_told=steps,
        steps_lost=lost,
        steps_beyond_those_told=in_flight,
    )


def missing(steps: int) -> str:
    if not steps:
        return "the run was killed before a step was recorded"
    return f"the step after {steps - 1} was in flight when the run was killed"


def runs(folder: Path) -> list[Path]:
    """Return the runs of a folder, each by the name that its file has or will have."""
    names = {path.name.removesuffix(".parts") for path in folder.glob("run*.parquet*")}
    return [folder / name for name in sorted(names)]


def number_of(path: Path) -> int | None:
    with gradtrace.open_run(path) as run:
        return int(run.info.command[-2])


def rows_by_step(run: gradtrace.Run) -> dict[int, dict[str, int]]:
    """Return for each step but the first, which has the initial state, how many rows of each kind it has."""
    query = "select step, tensor, count(*) from records where step > 0 and phase <> 'event' group by all"
    found: dict[int, dict[str, int]] = {}
    for step, tensor, count in run.sql(query).rows:
        found.setdefault(step, {})[tensor] = count
    return found


def test_a_signal_at_each_line_of_the_writer(tmp_path: Path, result: Callable[..., None]) -> None:
    ended = interrupt(tmp_path, first=1, stride=5)
    *moments, last = ended
    assert ended[last] == 0
    assert {ended[moment] for moment in moments} == {-signal.SIGTERM}
    for moment in moments:
        assert_kept(tmp_path / str(moment))
    result(
        "SIGTERM at every fifth line of Python that the writer runs through in six steps",
        signals=len(moments),
        deadlocks=0,
        steps_lost=0,
    )


STORM = """
    import json, os, random, signal, sys, threading, time
    import torch
    from torch import nn
    import gradtrace_cli.recording
    import gradtrace.capture.tracer
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace_cli.main import main

    torch.set_num_threads(1)
    batch_of_records([])
    folder, count, chance = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for number in range(count):
        where = os.path.join(folder, str(number))
        os.mkdir(where)
        name = chance.choice(["SIGTERM", "SIGHUP", "SIGINT", "SIGTERM twice", "SIGINT and SIGTERM"])
        delay, again = chance.uniform(0, 1.0), chance.uniform(0, 0.01)
        child = os.fork()
        if child == 0:
            os.chdir(where)
            said = os.open("said", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            open("started", "w").close()
            sys.exit(main(["record", "--max-size", "500kB", os.path.join(folder, "train.py"), str(number), "1000000"]))
        told, early = os.path.join(where, "told-" + str(number)), number % 5 == 0
        while not (os.path.exists(told) and (early or os.path.getsize(told))):
            time.sleep(0.001)
        time.sleep(delay)
        for signal_name in {"SIGTERM twice": ["SIGTERM", "SIGTERM"]}.get(name, name.split(" and ")):
            os.kill(child, getattr(signal, signal_name))
            time.sleep(again)
        limit = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < limit:
            time.sleep(0.005)
        if ended[0] == 0:
            os.kill(child, signal.SIGABRT)
            os.waitpid(child, 0)
            print(json.dumps([name, None]), flush=True)
        else:
            print(json.dumps([name, os.waitstatus_to_exitcode(ended[1])]), flush=True)
"""
STORMS = 100


def test_signals_at_random_moments_of_a_training(tmp_path: Path, result: Callable[..., None]) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = [sys.executable, "-c", textwrap.dedent(STORM), str(tmp_path), str(STORMS), str(SEED)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    ended = [tuple(eval(line, {"null": None})) for line in done.stdout.splitlines()]
    assert len(ended) == STORMS
    steps = 0
    for number, (name, code) in enumerate(ended):
        where = tmp_path / str(number)
        sent = {getattr(signal, one) for one in name.replace(" twice", "").split(" and ")}
        assert -(code or 0) in sent, (number, name, code)
        expected = told(where, number)
        with gradtrace.open_run(where / "run.parquet") as run:
            # The second of two may come while the recording is finished for the first.
            assert run.end in {f"signal {one.name}" for one in sent} | ({"killed"} if len(sent) > 1 else set())
            losses = run.sql("select step, max from records where tensor = 'loss' order by seq").rows
        assert losses[: len(expected)] == expected, (number, name)
        assert len(losses) <= len(expected) + 1
        steps += len(expected)
    assert steps > 10 * STORMS
    result(
        "Signals at random moments of a training, some of them twice or two at once",
        runs=STORMS,
        signals=dict(Counter(name for name, _ in ended)),
        hung=sum(code is None for _, code in ended),
        steps_told=steps,
        steps_lost=0,
    )
