"""msprobe (mindstudio-probe): every iteration is dumped at level mix, then its overflow_check reads the dumps.

The first iteration in which it names a node counts. It speaks of API names (``Tensor.sqrt``); an op is right where
the autograd node carries the same name, or is one of those that the API makes.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from msprobe.overflow_check.analyzer import OverFlowCheck
from msprobe.pytorch import PrecisionDebugger
from torch import nn

from benchmarks.zoo.peers.watching import QUIET, Answer, before_outermost_call, execute, iteration, own_models

CONFIG = {
    "task": "statistics",
    "rank": [],
    "step": [],
    "level": "mix",
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
}
NODES = {
    "linear": ["AddmmBackward0", "MmBackward0"],
    "matmul": ["MmBackward0", "BmmBackward0"],
    "pow": ["PowBackward0", "PowBackward1"],
    "svd": ["LinalgSvdBackward0"],
    "truediv": ["DivBackward0"],
}


def watch(script: Path) -> Answer:
    """Run the script with its models dumped and return what overflow_check says of the dumps."""
    with tempfile.TemporaryDirectory() as folder:
        dumps = _Dumps(Path(folder))
        before_outermost_call(dumps.note)
        error = execute(script)
        dumps.close()
        for number, step in enumerate(dumps.iterations):
            node = _first_anomaly(Path(folder, "dump", f"step{number}"), Path(folder, f"out{number}"))
            if node is not None:
                return _answer(node, step, script, dumps.several)
    if error is not None:
        return QUIET | {"note": f"the script ended with {type(error).__name__}: {error}".splitlines()[0]}
    return QUIET


class _Dumps:
    """One dump an iteration of the script's loop, of all its models."""

    def __init__(self, folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIG | {"dump_path": str(folder / "dump")}))
        self._debugger = PrecisionDebugger(config_path=str(config))
        self.iterations: list[int | None] = []
        self.several = False

    def note(self, model: nn.Module) -> None:
        """Begin the dump of an iteration at its first call."""
        if self.iterations and self.iterations[-1] == iteration():
            return
        self.close()
        self.iterations.append(iteration())
        models = own_models()
        self.several = len(models) > 1
        self._debugger.start(model=models if self.several else model)

    def close(self) -> None:
        """End the dump that is open."""
        if self.iterations:
            self._debugger.stop()
            self._debugger.step()


def _first_anomaly(dump: Path, out: Path) -> dict[str, Any] | None:
    OverFlowCheck(str(dump), str(out)).analyze()
    for written in out.glob("*.json"):
        ranks: dict[str, list[dict[str, Any]]] = json.loads(written.read_text())
        return next(iter(ranks.values()))[0]
    return None


def _answer(node: dict[str, Any], step: int | None, script: Path, several: bool) -> Answer:
    """Turn ``Tensor.sqrt.0.backward`` under ``Module.s.Distance.backward.0`` into this project's words.

    The tool does not name roots: an op under no module is a root's own or outside of all, and either reading counts.
    With ``several`` models a module's name begins with the model's number.
    """
    name: str = node["op_name"]
    enclosing = [part for part in (*node["construct_info"], name) if part.startswith("Module.")]
    module = ".".join(enclosing[-1].split(".")[2 if several else 1 : -3]) if enclosing else None
    backward = "backward" in name
    api = "" if name.startswith("Module.") else name.split(".")[1].strip("_")
    line = re.search(rf"{re.escape(script.name)}, line (\d+)", str(node["stack_info"]))
    answer: Answer = {
        "found": True,
        "iteration": step,
        "phase": "backward" if backward else "forward" if enclosing else "loss",
        "module": module,
        "op": NODES.get(api, [f"{api.title().replace('_', '')}Backward0"]) if api else None,
        "location": {"file": str(script), "line": int(line[1])} if line else None,
    }
    return answer if enclosing else answer | {"or": {"phase": "backward" if backward else "forward", "module": ""}}
