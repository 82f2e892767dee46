"""``gradtrace record --watch`` on a training with the real torch: which steps, why, and the last words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import gradtrace

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    if step == 30:
        optimizer.param_groups[0]["lr"] = 0.05
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def record(directory: Path, *options: str, width: int = 8, **environ: str) -> str:
    (directory / "train.py").write_text(TRAIN.replace("WIDTH", str(width)))
    done = subprocess.run(
        [sys.executable, "-m", "gradtrace", "record", *options, "train.py"],
        cwd=directory,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def switches(path: Path) -> list[tuple[int, str]]:
    with gradtrace.open_run(path) as run:
        return run.execute("SELECT step, detail FROM records WHERE tensor = 'switch' ORDER BY seq").fetchall()


def captured(path: Path) -> list[int]:
    """Return the steps in which a module inside of the model was seen."""
    with gradtrace.open_run(path) as run:
        query = "SELECT DISTINCT step FROM records WHERE phase = 'forward' AND module = '0' ORDER BY step"
        return [step for (step,) in run.execute(query).fetchall()]


def test_watch_mode_captures_the_first_steps_and_those_after_a_new_learning_rate(tmp_path: Path) -> None:
    said = record(tmp_path, "--watch", "-o", "run.parquet")

    path = tmp_path / "run.parquet"
    assert captured(path) == [0, 1, 2, 3, 4, 31, 32, 33]
    assert switches(path) == [
        (0, "captured in full from step 0: the first 5 steps"),
        (5, "watched from step 5"),
        (31, "captured in full from step 31: the learning rate went from 0.01 to 0.05"),
        (34, "watched from step 34"),
    ]
    assert re.search(r"wrote run.parquet: 60 steps \(8 captured in full\), 4 of 4 modules, ", said)


def test_a_wider_model_than_the_baselines_is_captured_for_longer(tmp_path: Path) -> None:
    record(tmp_path, "--watch", "-o", "old.parquet")
    said = record(tmp_path, "--watch", "--baseline", "old.parquet", "-o", "same.parquet")
    assert "(8 captured in full)" in said

    record(tmp_path, "-o", "wide.parquet", width=9, GRADTRACE_MODE="watch", GRADTRACE_BASELINE="old.parquet")

    assert captured(tmp_path / "wide.parquet") == [*range(20), 31, 32, 33]
    words = "0.weight is [9, 4], was [8, 4], and 2 more"
    assert [text.endswith(words) for _, text in switches(tmp_path / "wide.parquet")][:2] == [False, True]


def test_settings_of_the_project_choose_the_steps(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.gradtrace]\nmode = 'watch'\nwatch_first = 1\nwatch_after = 2\nsteps = '50:53'\n"
    )

    record(tmp_path, "-o", "run.parquet")
    said = record(tmp_path, "--full", "--steps", "0:", "-o", "full.parquet")

    assert captured(tmp_path / "run.parquet") == [0, 31, 32, 50, 51, 52]
    assert captured(tmp_path / "full.parquet") == list(range(60))
    assert "60 steps (60 captured in full)" in said


def test_steps_that_the_run_does_not_reach_leave_a_run_that_was_watched(tmp_path: Path) -> None:
    said = record(tmp_path, "--steps", "100:", "-o", "run.parquet")

    assert captured(tmp_path / "run.parquet") == []
    assert "gradtrace: warning: no step was captured in full: none of the run lies in steps 100:\n" in said
    with gradtrace.open_run(tmp_path / "run.parquet") as run:
        assert run.execute("SELECT count(*) FROM records WHERE tensor = 'loss'").fetchone() == (60,)
