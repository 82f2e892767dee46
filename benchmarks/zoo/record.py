"""Records a case's script, unmodified, as a user would, and asks for the verdict: two commands in a fresh folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.cases import Case

TIMEOUT_S = 300

# One thread: the models are tiny, and threads that spin take longer than the work.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def verdict(case: Case, options: Sequence[str] = ()) -> tuple[dict[str, Any] | None, str]:
    """Return what ``first-nan --json`` says of the script, None with the reason where it says nothing.

    ``options`` are more of ``record``'s.
    """
    with tempfile.TemporaryDirectory() as folder:
        gradtrace = (sys.executable, "-m", "gradtrace")
        try:
            _run(folder, *gradtrace, "record", *options, "-o", "run.parquet", str(case.script))
            asked = _run(folder, *gradtrace, "first-nan", "--json", "run.parquet")
        except subprocess.TimeoutExpired as error:
            return None, f"no answer in {error.timeout:.0f} s"
    try:
        answer: dict[str, Any] = json.loads(asked.stdout)
    except json.JSONDecodeError:
        return None, (asked.stderr.strip().splitlines() or ["no answer"])[-1]
    return answer, ""


def _run(folder: str | Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)
