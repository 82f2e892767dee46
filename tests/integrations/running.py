"""Runs the scripts of the integration tests, natively or recorded, each in a process of its own."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

SCRIPTS = Path(__file__).parent / "scripts"
# One thread: the models are small, and threads that spin cost minutes on a busy machine.
_ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*command: str, cwd: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``python *command``, which has to end with the exit code ``expected``."""
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=_ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    return done


def record(folder: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Record a script to ``run.parquet`` in ``folder``."""
    return run("-m", "gradtrace", "record", str(SCRIPTS / script), *args, cwd=folder)


def answer(folder: Path, command: str, *args: str, expected: int = 0) -> dict[str, Any]:
    """Return the JSON object that a command of gradtrace prints in ``folder``."""
    done = run("-m", "gradtrace", command, "--json", *args, cwd=folder, expected=expected)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def verdict_on(folder: Path) -> dict[str, Any]:
    """Return what ``first-nan`` says of the run in ``folder``."""
    return answer(folder, "first-nan", "run.parquet")


def called_modules(script: str) -> set[str]:
    """Run a script in this process, not recorded, and return the names of the modules that it calls."""
    called: dict[nn.Module, None] = {}
    handle = register_module_forward_pre_hook(lambda module, _: called.setdefault(module))
    try:
        with mock.patch.object(sys, "argv", [script]):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        handle.remove()
    model = next(iter(called))
    return {name for name, module in model.named_modules() if module in called}
