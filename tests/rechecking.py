"""Scripts, capsules and words that the tests of ``recheck`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace
from gradtrace.capture.recheck.batches import LoaderFacts, Yielded
from gradtrace.capture.recheck.capsule import save
from gradtrace.capture.recheck.contents import capsule_of
from gradtrace.capture.recheck.plain import structure
from gradtrace.errors import CapsuleError
from tests.failing_step import HandKept, failing_step

SCRIPTS = Path(__file__).parent / "scripts" / "recheck"
GIB = 2**30

HEAD = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
# Without an optimizer of torch's: loading it is most of such a script's time.
LOOP = """
for x, y in DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 2)), batch_size=2):
    loss = (model(x) - y).square().mean()
    model.zero_grad()
    loss.backward()
"""
TRAINING = HEAD + "model = nn.Linear(3, 2)\n" + LOOP


def capsule_of_script(folder: Path, script: Path, phase: str, **how: Any) -> Path:
    path = folder / f"{script.stem}.capsule.pt"
    save(path, failing_step(script, phase, **how), GIB)
    return path


def a_script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def with_optimizer(script: str) -> str:
    """Let a script that has none train with an optimizer."""
    new = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y"
    return script.replace("for x, y", new).replace("    loss.backward()", "    loss.backward()\n    optimizer.step()")


def a_capsule(folder: Path, script: str = TRAINING) -> Path:
    """Return the capsule of the first step of a script."""
    (folder / "before").mkdir()
    return capsule_of_script(folder, a_script(folder / "before", with_optimizer(script)), "backward", at_step=0)


def by_hand(path: Path, kept: HandKept, batch: list[torch.Tensor], number: int = 0, **more: Any) -> None:
    """Save the capsule of a call that a script of this file could have made."""
    yielded = Yielded(batch, LoaderFacts(0, "TensorDataset", structure(batch)))
    facts: dict[str, Any] = {"step": 0, "micro_step": 0, "boundary": "", "phase": "loss", "number": number}
    save(path, capsule_of(kept, yielded=yielded, **facts, **more), GIB)


def statuses(result: gradtrace.RecheckResult) -> list[str]:
    return [part.status for part in result.parts.values()]


FINE = "finite"
BAD = "not finite"
NOT_CHECKED = "not checked"


def error(capsule: Path, script: Path, *args: str) -> str:
    with pytest.raises(CapsuleError) as caught:
        gradtrace.recheck(capsule, script, args)
    return str(caught.value)
