"""Failures of real models: the verdict names what torch's own hooks say went non-finite first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ground_truth import Truth, first_nan
from tests.integrations.running import SCRIPTS, record, verdict_on

# The truth is found in this process, where the libraries' own warnings are theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("resnet18.py", ["--lr", "1e20"]),
        ("bert.py", ["--lr", "1e20"]),
        ("lightning_trainer.py", ["--lr", "1e30"]),
    ],
)
def test_a_learning_rate_that_overflows_is_found_where_the_forward_pass_overflows(
    script: str, args: list[str], tmp_path: Path
) -> None:
    truth = first_nan(SCRIPTS / script, *args, infinities=True)
    assert truth is not None
    assert (truth.step, truth.phase) == (1, "forward")

    record(tmp_path, script, *args)
    verdict = verdict_on(tmp_path)
    assert Truth(verdict["step"], verdict["phase"], verdict["module"]) == truth
    assert verdict["tensor"] == "output"


def test_a_loss_that_the_trainers_log_hides_is_found(tmp_path: Path) -> None:
    truth = first_nan(SCRIPTS / "hf_trainer.py", "--lr", "1e30", infinities=True)
    assert truth is not None

    printed = record(tmp_path, "hf_trainer.py", "--lr", "1e30").stdout
    assert printed.splitlines()[1].startswith("2 0.0 "), "the log says that the loss is 0"
    verdict = verdict_on(tmp_path)
    assert Truth(verdict["step"], verdict["phase"], verdict["module"]) == truth
    assert "loss" in verdict["reached"]


def test_a_batch_without_answers_makes_the_loss_of_a_language_model_nan_and_nothing_else(
    tmp_path: Path,
) -> None:
    args = ["--longest-prompt", "18", "--steps", "7"]
    printed = record(tmp_path, "gpt2.py", *args).stdout
    losses = [line.split()[1] for line in printed.splitlines()]
    assert losses.count("nan") == 1, "one batch has none, and training goes on from it"

    verdict = verdict_on(tmp_path)
    assert (verdict["step"], verdict["phase"]) == (losses.index("nan"), "forward")
    assert (verdict["module"], verdict["tensor"], verdict["path"]) == ("", "output", "loss")
    assert verdict["reached"] == ["loss"]
    assert verdict["affected"]["params"] == 0
