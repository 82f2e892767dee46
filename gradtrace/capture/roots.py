"""Which module is the root of an outermost call, and by what name the script knows it.

A script may call a part of its model (``model.encode(x)`` calls ``model.encoder``) before, or without, ever
calling the model itself. The variables of the calling frames tell which larger module it belongs to and what
that one is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from gradtrace.capture.names import unwrapped

_MOST_FRAMES = 40
_REFERENCES = 3
"""How many there are to a frame's dictionary: the frame's, the variable's and the one of the question itself."""

_NOT_A_NAME = frozenset({"self", "module", "m", "_", "cls"})


def find_root(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the largest module in sight of the callers that contains ``module``, and its name.

    The name is that of the variable or attribute that holds it, else the class's name.
    """
    best, label = module, ""
    size = len(_members(module))
    looked_at: set[int] = set()
    for name, candidate in _modules_in_sight(sys._getframe(1)):
        if unwrapped(candidate) is unwrapped(best):
            label = label or name
        if id(candidate) in looked_at:
            continue
        looked_at.add(id(candidate))
        members = _members(candidate)
        if len(members) > size and any(member is module for member in members):
            best, label, size = candidate, name, len(members)
    return unwrapped(best), label or type(unwrapped(best)).__name__


def _members(module: nn.Module) -> list[nn.Module]:
    try:
        return list(module.modules())
    except AttributeError:  # in sight, but not made yet: its __init__ is running, or has failed
        return []


def _modules_in_sight(frame: FrameType | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the user's frames hold, innermost first, with the names they hold them by."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "gradtrace"):
            yield from _held_by(_local_variables(frame))
            yield from _held_by(dict(frame.f_globals))
        frame = frame.f_back


def _local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's local variables.

    Up to Python 3.12 a function's frame keeps the dictionary that it is asked for, and with it every tensor
    that was in a variable at that time. It is emptied, unless the user holds it: ``locals()`` is the same one.
    """
    variables = frame.f_locals
    copy = dict(variables)
    is_snapshot = type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_snapshot and sys.getrefcount(variables) <= _REFERENCES:
        variables.clear()
    return copy


def _held_by(variables: dict[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in variables.items():
        if _is_module(value):
            yield ("" if name in _NOT_A_NAME or name.startswith("_") else name), value
    owner = variables.get("self")
    if owner is not None and not _is_module(owner):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if _is_module(value):
                yield name.lstrip("_"), value


def _is_module(value: Any) -> bool:
    # Not isinstance: it would run the user's __class__ properties and lazy objects.
    return issubclass(type(value), nn.Module)
