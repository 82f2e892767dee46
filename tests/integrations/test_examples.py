"""The examples, recorded for real: the verdict names what torch's own hooks say went NaN first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ground_truth import Truth, first_nan

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

SCRIPTS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(("lightning_", "transformers_"))
)
"""Those of the trainers' callbacks need the trainers, and are run with them (integrations/test_callbacks.py)."""

# One thread, here and there: the models are small, and threads that spin cost minutes on a busy machine.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# Which tensor of the boundary holds the NaN, by the phase in which it was made.
TENSOR = {"input": "input", "forward": "output", "backward": "grad_input"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let torch work with one thread in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _run(*command: str, cwd: Path) -> str:
    """Run ``python *command``, which has to succeed, and return what it printed."""
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _record(run: Path, script: str, *args: str) -> str:
    """Record an example and return what it printed."""
    return _run("-m", "gradtrace", "record", "-o", str(run), str(EXAMPLES / script), *args, cwd=run.parent)


def _verdict(run: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads(_run("-m", "gradtrace", "first-nan", "--json", str(run), cwd=run.parent))
    return verdict


def _first_healthy_steps(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "loss" in line and "nan" not in line]


@pytest.mark.parametrize(
    ("script", "args", "phase", "module", "op"),
    [
        ("char_transformer.py", ["--steps", "30"], "forward", "blocks.0.attention.softmax", None),
        ("metric_learning.py", ["--steps", "60"], "backward", "distance", "SqrtBackward0"),
        ("residual_cnn.py", ["--steps", "8", "--crop", "16"], "input", "", None),
    ],
)
def test_the_verdict_on_an_example_is_what_torchs_own_hooks_say(
    script: str, args: list[str], phase: str, module: str, op: str | None, tmp_path: Path
) -> None:
    truth = first_nan(EXAMPLES / script, *args)
    assert truth is not None
    assert (truth.phase, truth.module, truth.op) == (phase, module, op)
    assert truth.step > 2, "some healthy steps come first"

    printed = _record(tmp_path / "run.parquet", script, *args)
    assert _first_healthy_steps(printed)
    verdict = _verdict(tmp_path / "run.parquet")
    assert verdict["found"] is True
    found = Truth(verdict["step"], verdict["phase"], verdict["module"], op)
    assert found == truth
    assert verdict["tensor"] == TENSOR[phase]
    assert verdict["kind"] == "NaN"


def test_a_healthy_example_is_found_healthy(tmp_path: Path) -> None:
    args = ["--steps", "8"]
    assert first_nan(EXAMPLES / "residual_cnn.py", *args) is None

    printed = _record(tmp_path / "run.parquet", "residual_cnn.py", *args)
    assert "accuracy on new images" in printed
    verdict = _verdict(tmp_path / "run.parquet")
    assert verdict["found"] is False
    assert verdict["incidents"] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_prints_the_same_when_it_is_recorded(script: str, tmp_path: Path) -> None:
    args = ["--steps", "3"]
    native = _run(str(EXAMPLES / script), *args, cwd=tmp_path)
    assert _record(tmp_path / "run.parquet", script, *args) == native


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_knows_nothing_of_gradtrace(script: str) -> None:
    assert "gradtrace" not in (EXAMPLES / script).read_text(encoding="utf-8")
