"""``gradtrace.recheck``: what cannot be checked, and what is said then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradtrace
from gradtrace.capture.recheck.capsule import load, save
from gradtrace.errors import CapsuleError, CaptureError, RunNotFoundError
from tests.rechecking import (
    FINE,
    GIB,
    NOT_CHECKED,
    SCRIPTS,
    TRAINING,
    a_capsule,
    a_script,
    capsule_of_script,
    error,
    statuses,
)


@pytest.fixture(scope="module")
def standardise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The failing step of a script without a DataLoader."""
    return capsule_of_script(tmp_path_factory.mktemp("capsules"), SCRIPTS / "standardise.py", "forward")


def test_weights_that_no_longer_fit_are_named_with_their_shapes(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    wider = TRAINING.replace("nn.Linear(3, 2)", "nn.Linear(3, 5)").replace("(8, 2)", "(8, 5)")
    assert error(capsule, a_script(tmp_path, wider)) == (
        "Linear no longer fits the weights in the capsule: "
        "other shape: weight [2, 3] captured, [5, 3] now, bias [2] captured, [5] now"
    )
    without_bias = TRAINING.replace("nn.Linear(3, 2)", "nn.Linear(3, 2, bias=False)")
    assert error(capsule, a_script(tmp_path, without_bias)).endswith("in the capsule: gone: bias")
    deeper = TRAINING.replace("nn.Linear(3, 2)", "nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))")
    assert error(capsule, a_script(tmp_path, deeper)) == (
        "Sequential no longer fits the weights in the capsule: "
        "new: 0.weight, 0.bias, 1.weight, 1.bias; gone: weight, bias; "
        "new: 1.running_mean, 1.running_var, 1.num_batches_tracked"
    )


def test_a_root_that_is_never_called_is_named_with_those_that_were(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    other = a_script(
        tmp_path,
        TRAINING.replace("model", "head")
        .replace("nn.Linear(3, 2)", "nn.Bilinear(3, 3, 2)")
        .replace("head(x)", "head(x, x)"),
    )
    assert error(capsule, other) == (
        f"{other} ended; model (Linear) was never called in grad mode for training; called were head (Bilinear)"
    )
    nothing = a_script(tmp_path, "import torch")
    assert error(capsule, nothing).endswith("was never called in grad mode for training; no model was")
    assert error(capsule, a_script(tmp_path, "print('hello')")).endswith("train.py ended before it imported torch")


def test_a_dataloader_with_other_batches_is_said(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    other = TRAINING.replace("TensorDataset(torch.randn(8, 3), torch.randn(8, 2))", "[(torch.ones(3), 1)] * 4")
    assert error(capsule, a_script(tmp_path, other)) == (
        "no DataLoader yields batches like the captured one: the captured batch is "
        "list[float32 2-d] (dataset TensorDataset); yielded were list[float32 2-d, int64 1-d]"
    )


def test_a_script_that_fails_before_the_call_shows_its_own_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capsule = a_capsule(tmp_path)
    script = a_script(tmp_path, TRAINING.replace("for x, y", "raise KeyError('here')\nfor x, y"))
    assert (
        error(capsule, script)
        == f"{script} failed (KeyError, traceback above) before the captured call of model (Linear)"
    )
    shown = capfd.readouterr().err
    assert "KeyError: 'here'" in shown
    assert "gradtrace" not in shown


def test_a_script_that_fails_after_the_call_is_not_finite_nor_mended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capsule = a_capsule(tmp_path)
    script = a_script(tmp_path, TRAINING.replace("    model.zero_grad()", "    loss.nonsense"))
    assert error(capsule, script) == (
        f"{script} failed (AttributeError, traceback above) "
        "after the captured call began, before its backward() was through"
    )
    assert "nonsense" in capfd.readouterr().err


def test_an_error_in_the_call_itself_is_the_script_s(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capsule = a_capsule(tmp_path)
    script = a_script(tmp_path, TRAINING.replace("model(x)", "model(x.T)"))
    assert "failed (RuntimeError, traceback above)" in error(capsule, script)
    shown = capfd.readouterr().err
    assert "model(x.T)" in shown and "recheck_step" not in shown


def test_a_process_that_is_killed_is_said(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    script = a_script(tmp_path, "import os; os._exit(7)")
    assert error(capsule, script) == f"{script} ended the process (exit 7) before anything could be checked"


def test_files_that_are_not_there_or_no_capsules(tmp_path: Path) -> None:
    script = a_script(tmp_path, TRAINING)
    with pytest.raises(RunNotFoundError, match=r"^no such capsule: .*nothing.pt$"):
        gradtrace.recheck(tmp_path / "nothing.pt", script)
    with pytest.raises(CapsuleError, match=r"is no capsule of gradtrace$"):
        gradtrace.recheck(script, script)
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(CapsuleError, match=r"weights.pt is no capsule of gradtrace$"):
        gradtrace.recheck(tmp_path / "weights.pt", script)
    with pytest.raises(CaptureError, match=r"^no such script: nowhere.py$"):
        gradtrace.recheck(script, "nowhere.py")


def test_captured_gradients_that_no_longer_fit_are_said(standardise: Path, tmp_path: Path) -> None:
    text = (SCRIPTS / "standardise.py").read_text()
    script = a_script(tmp_path, text.replace("nn.Linear(4, 1))", "nn.Linear(4, 1), nn.Flatten(0))"))
    assert error(standardise, script) == "output 0 of the call, [3, 1] when captured, is of shape [3] now"


def test_a_loss_failure_without_a_dataloader_cannot_pass(standardise: Path, tmp_path: Path) -> None:
    capsule = load(standardise)
    capsule.phase = "loss"
    save(tmp_path / "c", capsule, GIB)
    result = gradtrace.recheck(tmp_path / "c", SCRIPTS / "standardise.py", ["--mended"])
    assert statuses(result) == [FINE, FINE, NOT_CHECKED, NOT_CHECKED]
    assert not result.ok
