"""What the schema of an operation says: its operands' names, what it writes into, whether it makes values.

Looks at no values and runs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

_BATCH_NORM_STATE = ("running_mean", "running_var")
_RANDOM = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_OVERWRITES = frozenset(("copy_", "fill_", "zero_", "set_", "resize_", *_RANDOM))
_FILLS = frozenset(("copy_", "fill", "fill_", "index_fill", "index_fill_", "index_put", "index_put_", "masked_fill"))
_FILLS |= {"masked_fill_", "where"}
_CONSTANTS = frozenset(("lift_fresh", "lift_fresh_copy"))

Named = tuple[str, Any]
"""An operand's name and its value: a tensor or a number."""


class Traits:
    """What is known of one operation by its schema.

    ``makes_nothing`` is true of views, ``uninitialised`` where the result's values are whatever memory held,
    ``fills`` where an operand without dimensions may be a constant that is written, ``constant`` where the
    operand is a constant that Python has just made.
    """

    def __init__(self, function: Any) -> None:
        schema = getattr(function, "_schema", None)  # higher-order operations have none
        space, _, name = str(schema.name if schema is not None else function).rpartition("::")
        self.namespace = space
        self.name = f"{space}.{name}" if space else name
        self.constant = name in _CONSTANTS
        self.fills = name in _FILLS
        self.uninitialised = name.startswith(("empty", "new_empty"))
        arguments = [] if schema is None else list(schema.arguments)
        self._names = [argument.name for argument in arguments]
        self._writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self._unread = {a.name for a in arguments if a.name in self._writes and (a.kwarg_only or name in _OVERWRITES)}
        self._operands = {a.name for a in arguments if "Tensor" in str(a.type) or str(a.type) == "number"}
        self._is_known = schema is not None
        returns = [] if schema is None else list(schema.returns)
        aliases = [r.alias_info for r in returns if r.alias_info is not None]
        self.makes_nothing = bool(aliases) and not any(alias.is_write for alias in aliases) and not self.constant

    def operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Named]:
        """Return the tensors and numbers that were given, with their names; those of a list are numbered."""
        return [
            operand
            for name, value in self._given(args, kwargs)
            if name in self._operands or not self._is_known
            for operand in _flat(name, value)
        ]

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Named]:
        """Return the tensors that the operation writes into, as its schema says."""
        if not self._writes:
            return []
        given = self._given(args, kwargs)
        return [operand for name, value in given if name in self._writes for operand in _flat(name, value)]

    def silently_written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Named]:
        """Return the statistics that a batch norm updates; the schemas of old do not tell."""
        if not self._names or not set(_BATCH_NORM_STATE).intersection(self._names):
            return []
        given = dict(self._given(args, kwargs))
        if not given.get("training", given.get("train", True)):
            return []
        return [(name, given[name]) for name in _BATCH_NORM_STATE if isinstance(given.get(name), Tensor)]

    def is_read(self, name: str) -> bool:
        """Whether the values that an operand has before the operation count."""
        return name.partition(".")[0] not in self._unread

    def _given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Named]:
        names = self._names or [str(number) for number in range(len(args))]
        return [*zip(names, args, strict=False), *kwargs.items()]


@functools.cache
def traits_of(function: Any) -> Traits:
    """Return what is known of an operation."""
    return Traits(function)


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in what an operation returned, in order."""
    return [value for _, value in _flat("", result) if isinstance(value, Tensor)]


def _flat(name: str, value: Any) -> Iterator[Named]:
    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _flat(f"{name}.{number}", item)
