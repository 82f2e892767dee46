"""What every peer's watcher shares: the script's own loop counter, and the models that it calls.

A script runs unmodified in a fresh ``__main__``; a watcher sees it only through torch's public switches and hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

Answer = dict[str, Any]
QUIET: Answer = {"found": False}


def execute(script: Path) -> BaseException | None:
    """Run the script as ``python script`` would and return the exception that ended it."""
    main = ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"], sys.argv, sys.path[0] = main, [str(script)], str(script.parent)
    try:
        exec(compile(script.read_text(), script, "exec"), main.__dict__)
    except Exception as error:
        return error
    return None


def iteration() -> int | None:
    """Return the script's loop counter: every script of the zoo counts its loop in a global ``step``."""
    step = getattr(sys.modules["__main__"], "step", None)
    return step if isinstance(step, int) else None


def own_models() -> list[nn.Module]:
    """Return the script's models, in the order in which it made them: its global modules that have parameters."""
    found = [value for value in vars(sys.modules["__main__"]).values() if isinstance(value, nn.Module)]
    return [model for model in dict.fromkeys(found) if any(True for _ in model.parameters())]


def before_outermost_call(note: Callable[[nn.Module], None]) -> None:
    """Call ``note`` with the module before every outermost call of one that has parameters."""
    plain, depth = nn.Module.__call__, [0]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not depth[0] and any(True for _ in self.parameters()):
            note(self)
        depth[0] += 1
        try:
            return plain(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    nn.Module.__call__ = call  # type: ignore[method-assign]
