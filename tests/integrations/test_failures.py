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
