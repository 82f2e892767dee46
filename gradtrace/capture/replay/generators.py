"""Random number generators of the script's own, as far as a model's forward can reach them by a name.

The global ones are the business of ``rng.py``. Looked for in the modules' attributes, in what those hold, and in the
variables around the ``forward`` functions.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_MOST_LOOKED_AT = 20_000
_DEEPEST = 4
_NOT_THE_USERS = ("torch", "numpy", "builtins", "gradtrace")


def kept_states(modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
    """Return for each generator that the modules can reach a function that gives it back its present state."""
    restores = []
    for value in _reachable(modules):
        restore = _kept_state(value)
        if restore is not None:
            restores.append(restore)
    return restores


def _kept_state(value: Any) -> Callable[[], object] | None:
    kind = type(value)
    if issubclass(kind, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "RandomState":
        return functools.partial(value.set_state, value.get_state())
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "Generator":
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None


def _reachable(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield everything in sight once; what is deep, or comes late, is left out."""
    seen: set[int] = set()
    level = [value for module in modules for value in (*module.__dict__.values(), *_around_forward(module))]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) > _MOST_LOOKED_AT:
                continue
            seen.add(id(value))
            yield value
            below += _inside(value)
        level = below


def _around_forward(module: nn.Module) -> list[Any]:
    """Return the variables that the module's ``forward`` can use: those of its file and of the functions around it."""
    held = next((part for part in map(vars, (module, *type(module).__mro__)) if "forward" in part), {})
    forward = held.get("forward")
    function: Any = getattr(forward, "__func__", forward)
    found: list[Any] = []
    while (code := getattr(function, "__code__", None)) is not None and not _is_a_librarys(function):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        found += [*cells, *(function.__globals__[name] for name in code.co_names if name in function.__globals__)]
        function = getattr(function, "__wrapped__", None)
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, int, float, torch.Tensor, nn.Module, type)) or value is None:
        return []
    if type(value) in (list, tuple, set, frozenset):
        return list(value)
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return list(value.values())
    attributes = getattr(value, "__dict__", None) if not _is_a_librarys(type(value)) else None
    return list(attributes.values()) if type(attributes) is dict else []


def _is_a_librarys(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] in _NOT_THE_USERS
