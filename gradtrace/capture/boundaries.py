"""What is seen at a module call: nested arguments and results flattened to (path, tensor).

A path is the way from the arguments or results to the tensor: positions in tuples and lists, keys of
mappings, names of keyword arguments and dataclass fields, joined by dots. A result that is one tensor has the
path ``0``, as if it were a tuple of one, which is how torch's own hooks see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from gradtrace.capture.subclasses import note
from gradtrace.trace.sent import let_pass

Found = list[tuple[str, Tensor]]

_DEEPEST = 12
"""Nesting beyond this is no batch."""


def tensors_in_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Return the tensors of a call's arguments with their paths, in order."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        return [("0", args[0])]
    found: Found = []
    for index, value in enumerate(args):
        if type(value) is Tensor:
            found.append((str(index), value))
        elif value is not None:
            _collect(value, str(index), found, ())
    for name, value in kwargs.items():
        if type(value) is Tensor:
            found.append((name, value))
        elif value is not None:
            _collect(value, name, found, ())
    return found


def tensors_in_result(result: Any) -> Found:
    """Return the tensors of a call's result with their paths, in order."""
    if type(result) is Tensor:
        return [("0", result)]
    found: Found = []
    _collect(result, "", found, ())
    return [("0", result)] if isinstance(result, Tensor) else found


def _collect(value: Any, path: str, found: Found, containers: tuple[Any, ...]) -> None:
    """Add the tensors in ``value``; ``containers`` are those that it lies in, outermost first."""
    if isinstance(value, Tensor):
        note(type(value))
        found.append((path, value))
        return
    if value is None or isinstance(value, (str, bytes, int, float)):
        return
    if len(containers) > _DEEPEST or any(container is value for container in containers):
        return
    for key, item in _items(value):
        _collect(item, f"{path}.{key}" if path else str(key), found, (*containers, value))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return ()


def is_computed(value: Tensor) -> bool:
    """Whether a tensor is the result of operations that gradients flow back through."""
    try:
        return value.grad_fn is not None
    except RuntimeError as error:  # a view whose base was changed in place: torch knows that it had a history
        let_pass(error)
        return True
