"""One failing step of real models each: the replay names the operation and its line, and nothing else changes.

What is expected is derived by hand: 0/0 is nan, so is the softmax of a row that is -inf throughout; 300 squared is
more than float16 holds, and weights of 1e13 make products of queries and keys that float32 does not hold.
"""

from __future__ import annotations

import functools
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.running import SCRIPTS, answer, record, run, verdict_on


@dataclass(frozen=True)
class Case:
    """A script with the boundary, the operation and the line at which its failing step fails.

    ``line`` begins a line of ``file``, which is the script itself where it is empty; ``caller`` begins the line of
    the script that led there, ``replayed`` are the forward operation and the kind of its value.
    """

    script: str
    args: tuple[str, ...]
    step: int
    boundary: tuple[str, str, str]
    replayed: tuple[str, str]
    line: str
    caller: str = ""
    file: str = ""
    reached: tuple[str, ...] = ("loss", "grad")


KEYPOINTS = Case(
    "resnet18_keypoints.py",
    (),
    step=2,
    boundary=("", "output", "0"),
    replayed=("DivBackward0", "NaN"),
    line="return errors.sum(dim=1) / visible.sum(dim=1)",
)
ENERGY = Case(
    "lightning_energy.py",
    (),
    step=2,
    boundary=("energy", "output", "0"),
    replayed=("PowBackward0", "Infinity"),
    line="energy = scaled.square()",
    reached=("loss", "grad", "param"),
)
CASES = (
    Case(
        "gpt2.py",
        ("--longest-prompt", "160", "--steps", "6"),
        step=4,
        boundary=("", "output", "loss"),
        replayed=("NllLossBackward0", "NaN"),
        line="loss = nn.functional.cross_entropy(",
        caller="loss = model(input_ids=tokens",
        file="loss_utils.py",
        reached=("loss",),
    ),
    Case(
        "bert_pooling.py",
        (),
        step=2,
        boundary=("pool", "output", "0"),
        replayed=("SoftmaxBackward0", "NaN"),
        line="weights = scores.softmax(dim=-1)",
    ),
    KEYPOINTS,
    Case(
        "hf_trainer.py",
        ("--lr", "1e13", "--bf16"),
        step=1,
        boundary=("transformer.h.0.attn", "output", "0"),
        replayed=("BmmBackward0", "Infinity"),
        line="attn_output = torch.nn.functional.scaled_dot_product_attention(",
        caller="trainer.train()",
        file="sdpa_attention.py",
        reached=("loss", "grad", "param"),
    ),
    ENERGY,
)


@dataclass(frozen=True)
class Failure:
    """One script, run natively and recorded, with the verdict on it."""

    case: Case
    native: str
    printed: str
    verdict: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def failure_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Failure]:
    """Runs the script of a case twice, once for all tests."""

    @functools.cache
    def run_twice(case: Case) -> Failure:
        folder = tmp_path_factory.mktemp("failing")
        native = run(str(SCRIPTS / case.script), *case.args, cwd=folder)
        done = record(folder, case.script, *case.args)
        return Failure(case, native.stdout, done.stdout, verdict_on(folder), folder)

    return run_twice


@pytest.fixture(params=CASES, ids=lambda case: case.script)
def failure(request: pytest.FixtureRequest, failure_of: Callable[[Case], Failure]) -> Failure:
    """Each of the cases."""
    return failure_of(request.param)


def test_the_training_goes_on_bit_for_bit_as_without_a_replay(failure: Failure) -> None:
    assert "nan" in failure.native
    assert failure.printed == failure.native


def test_the_boundary_is_named(failure: Failure) -> None:
    said, case = failure.verdict, failure.case
    assert (said["step"], said["phase"]) == (case.step, "forward")
    assert (said["module"], said["tensor"], said["path"]) == case.boundary
    assert said["reached"] == list(case.reached)


def test_the_replay_reproduces_the_step_and_names_the_operation_and_its_line(failure: Failure) -> None:
    said, case = failure.verdict, failure.case
    assert said["confirmation"]["status"] == "reproduced", said["confirmation"]["reason"]
    assert (said["op"], said["op_kind"]) == case.replayed
    place = said["location"]
    assert Path(place["file"]).name == (case.file or case.script)
    lines = Path(place["file"]).read_text(encoding="utf-8").splitlines()
    assert lines[place["line"] - 1].strip().startswith(case.line)


def test_the_line_of_the_script_that_led_there_is_in_the_traceback(failure: Failure) -> None:
    script = SCRIPTS / failure.case.script
    lines = script.read_text(encoding="utf-8").splitlines()
    in_script = [lines[f["line"] - 1].strip() for f in failure.verdict["traceback"] if Path(f["file"]) == script]
    expected = failure.case.caller or failure.case.line
    assert any(line.startswith(expected) for line in in_script), in_script


def test_the_failing_step_is_saved_for_the_owner_alone(failure: Failure) -> None:
    path = failure.folder / "run.capsule.pt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert isinstance(torch.load(path, weights_only=True), dict)


def test_the_log_of_a_trainer_may_hide_what_the_verdict_names(failure: Failure) -> None:
    shown = {"hf_trainer.py": "2 0.0 nan", "gpt2.py": "4 nan"}
    assert shown.get(failure.case.script, "nan") in failure.printed


@pytest.mark.parametrize(
    ("case", "broken", "mended"),
    [
        (KEYPOINTS, "visible.sum(dim=1)\n", "visible.sum(dim=1).clamp_min(1)\n"),
        (ENERGY, "scaled.square()", "scaled.float().square()"),
    ],
    ids=lambda value: value.script if isinstance(value, Case) else "",
)
def test_the_failing_step_is_finite_once_the_script_is_mended(
    case: Case, broken: str, mended: str, failure_of: Callable[[Case], Failure], tmp_path: Path
) -> None:
    text = (SCRIPTS / case.script).read_text(encoding="utf-8")
    assert text.count(broken) == 1
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    capsule = str(failure_of(case).folder / "run.capsule.pt")
    before = answer(tmp_path, "recheck", capsule, "train.py", expected=1)
    (tmp_path / "train.py").write_text(text.replace(broken, mended), encoding="utf-8")
    after = answer(tmp_path, "recheck", capsule, "train.py")
    parts = ("input", "forward", "loss", "gradients")
    assert [before[part]["status"] for part in parts] == ["finite", *["not finite"] * 3]
    assert [after[part]["status"] for part in parts] == ["finite"] * 4
