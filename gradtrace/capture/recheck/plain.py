"""Nested arguments and batches as plain data that ``torch.load(weights_only=True)`` reads, and back again.

Plain are dicts, lists, tuples, tensors and the few leaf types below. What a container of the user's own making
(a namedtuple, a ``BatchEncoding``, a dataclass) was is lost on the way; ``rebuild`` takes it from a template, which
the script hands out anyway. Nothing is copied here but containers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import CapsuleError

_LEAVES = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size)
_KEYS = (str, int, bool, type(None))
_TENSORS = (Tensor, nn.Parameter)
_DEEPEST = 12
"""Nesting beyond this is no batch; a container that holds itself ends here."""


def to_plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return ``value`` as plain data; its tensors are aliases without history.

    Raises:
        CapsuleError: something in it cannot be loaded with ``weights_only``; ``where`` names the place.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value, where)
    if type(value) in _LEAVES:
        return value
    if depth > _DEEPEST:
        raise CapsuleError(f"{where} is nested more than {_DEEPEST} deep")
    if (fields := _fields(value)) is not None:
        for key in fields:
            if type(key) not in _KEYS:
                raise CapsuleError(f"{where} has a key of type {_type_name(key)}, which no capsule can hold")
        return {key: to_plain(item, f"{where}.{key}", depth + 1) for key, item in fields.items()}
    if isinstance(value, (list, tuple)):
        items = (to_plain(item, f"{where}.{index}", depth + 1) for index, item in enumerate(value))
        return list(items) if isinstance(value, list) else tuple(items)
    raise CapsuleError(f"{where} is of type {_type_name(value)}, which no capsule can hold")


def structure(value: Any, depth: int = 0) -> str:
    """Return what tells batches of one kind from others: types, keys, element types, numbers of dimensions.

    Sizes are no part of it, nor is how many items of one structure follow each other.
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {value.dim()}-d"
    name = type(value).__name__
    if depth > _DEEPEST:
        return name
    if (fields := _fields(value)) is not None:
        return f"{name}({', '.join(f'{key}: {structure(item, depth + 1)}' for key, item in fields.items())})"
    if isinstance(value, (list, tuple)):
        different = (kind for kind, _ in itertools.groupby(structure(item, depth + 1) for item in value))
        return f"{name}[{', '.join(different)}]"
    return name


def rebuild(template: Any, plain: Any) -> Any:
    """Return a copy of ``plain`` with the container types and the devices of ``template``.

    Where the two do not fit together, plain containers stay plain and tensors where they are.
    """
    if isinstance(plain, Tensor):
        device = template.device if isinstance(template, Tensor) else plain.device
        # From a CPU tensor ``to`` another device is a copy already.
        moved = plain.detach().to(device) if device != plain.device else plain.detach().clone()
        return moved.requires_grad_(plain.requires_grad)
    if isinstance(plain, dict):
        return _rebuild_fields(template, plain)
    if isinstance(plain, (list, tuple)):
        items = [rebuild(_nth(template, index), item) for index, item in enumerate(plain)]
        kind = type(template) if isinstance(template, type(plain)) else type(plain)
        make = getattr(kind, "_make", kind)  # of a namedtuple
        return make(items)
    return plain


def tensors_in_plain(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of plain data with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in_plain(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from tensors_in_plain(item, f"{path}.{index}" if path else str(index))


def _plain_tensor(tensor: Tensor, where: str) -> Tensor:
    # A subclass (DTensor, a quantized or a user's one) is more than its numbers.
    if type(tensor) not in _TENSORS:
        raise CapsuleError(f"{where} is of type {_type_name(tensor)}, which no capsule can hold")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CapsuleError(f"{where} is a {kind} tensor, which no capsule can hold")
    alone = tensor.detach().resolve_conj().resolve_neg()
    return alone.requires_grad_(tensor.requires_grad)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a mapping or dataclass, None for everything else."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def _rebuild_fields(template: Any, plain: dict[Any, Any]) -> Any:
    fields = _fields(template) or {}
    values = {key: rebuild(fields.get(key), item) for key, item in plain.items()}
    if not fields or type(template) is dict:
        return values
    new = copy.copy(template)
    for key, item in values.items():
        if isinstance(template, Mapping):
            new[key] = item
        else:
            object.__setattr__(new, key, item)  # also of a frozen dataclass
    return new


def _nth(template: Any, index: int) -> Any:
    if not isinstance(template, (list, tuple)) or not template:
        return None
    return template[min(index, len(template) - 1)]


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
