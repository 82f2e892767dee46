"""torch.autograd.detect_anomaly: the op of its message, and the line of the forward traceback that it warns with."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from benchmarks.zoo.peers.watching import QUIET, Answer, execute, iteration

MESSAGE = re.compile(r"Function '(\w+)' returned nan values")


def watch(script: Path) -> Answer:
    """Run the script in anomaly mode and return what it raised."""
    torch.autograd.set_detect_anomaly(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = execute(script)
    match = MESSAGE.search(str(error))
    if error is None or match is None:
        return QUIET | ({"note": f"the script ended with {type(error).__name__}"} if error else {})
    lines = re.findall(rf'File "{re.escape(str(script))}", line (\d+)', "".join(str(w.message) for w in caught))
    location = {"file": str(script), "line": int(lines[-1])} if lines else None
    return {"found": True, "iteration": iteration(), "op": match[1], "location": location}
