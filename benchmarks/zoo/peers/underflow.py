"""transformers.debug_utils.DebugUnderflowOverflow: the module of the last frame that it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow

from benchmarks.zoo.peers.watching import QUIET, Answer, before_outermost_call, execute, iteration

FRAME = re.compile(r"^ {18}(\S*) \w+$", re.MULTILINE)


def watch(script: Path) -> Answer:
    """Run the script with the tool attached to every model and return what it reported."""
    attached: dict[nn.Module, DebugUnderflowOverflow] = {}
    before_outermost_call(lambda model: _attach(attached, model))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        error = execute(script)
    if error is None:
        return QUIET
    if "DebugUnderflowOverflow: inf/nan detected" not in str(error):
        return QUIET | {"note": f"crashed: {type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"found": True, "iteration": iteration(), "module": FRAME.findall(printed.getvalue())[-1]}


def _attach(attached: dict[nn.Module, DebugUnderflowOverflow], model: nn.Module) -> None:
    if model not in attached:
        attached[model] = DebugUnderflowOverflow(model)
