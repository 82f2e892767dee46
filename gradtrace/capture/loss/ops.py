"""From an autograd node to the ATen operator that made it: what its operands are called, and the result once more.

A node keeps what its derivative needs under the names of the operator's arguments. Where that is all of them, the
operator can be run again. It never is where it draws random numbers or changes what it is given.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.capture.session import quiet

Saved = Mapping[str, Any]
"""What a node has kept, by argument name: numbers, tensors, and None for a tensor that was not needed."""

_NODE_NAME = re.compile(r"(?P<op>\w+?)Backward\d*$")
_WORDS = (re.compile(r"(?<!^)(?=[A-Z])"), re.compile(r"(?<!^)(?=[A-Z][a-z])"))
"""SmoothL1Loss -> smooth_l1_loss takes the first, NllLoss2D -> nll_loss2d the second."""
_FORMS = ("{}", "_{}", "{}_forward", "_{}_forward")
_NEVER_DIFFERENTIABLE = frozenset({"condition", "mask", "index", "indices"})
_MAYBE_DIFFERENTIABLE = frozenset({"target", "targets", "weight", "pos_weight", "input_lengths", "target_lengths"})
_CHANGES_ITS_ARGUMENTS = re.compile("batch_norm|instance_norm|embedding_renorm|observe|moving_avg")
"""Operators that write to running statistics, which their schemas do not say."""
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")
_SIGNED_LIMIT = 2**63


class Operator(NamedTuple):
    """``names`` are the operands that a gradient may flow to, one for each edge of the node."""

    overload: Any
    names: tuple[str, ...]


def operator_of(name: str, edges: int, saved: Saved) -> Operator | None:
    """Return the operator that a node of this name, number of edges and kept values stems from, if it is known."""
    best: tuple[tuple[int, int], Operator] | None = None
    for overload in _overloads(name):
        names = _differentiable(overload, edges)
        if names is None or not _types_fit(overload, saved):
            continue
        arguments = {argument.name for argument in overload._schema.arguments}
        rank = (-_missing(overload, names, saved), len(arguments & saved.keys()))
        if best is None or rank > best[0]:
            best = rank, Operator(overload, names)
    return best[1] if best is not None else None


def evaluate(
    operator: Operator, node: Any, saved: Saved, operands: Sequence[Tensor | None]
) -> tuple[Tensor, ...] | None:
    """Run an operator again on the values of its operands; None where that cannot be done."""
    shapes = [(tuple(data.shape), data.dtype) for data in node._input_metadata]
    arguments = _arguments(operator, saved, operands, shapes)
    if arguments is None:
        return None
    with _unnoticed():
        try:
            result = operator.overload(*arguments[0], **arguments[1])
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    results = results[: len(shapes)]
    return results if [(tuple(r.shape), r.dtype) for r in results] == shapes else None


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    with quiet(), torch._C._DisableAutocast(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _overloads(name: str) -> Iterator[Any]:
    match = _NODE_NAME.match(name)
    if match is None:
        return
    words = dict.fromkeys(pattern.sub("_", match["op"]).lower() for pattern in _WORDS)
    for form in _FORMS:
        for word in words:
            packet = getattr(torch.ops.aten, form.format(word), None)
            for variant in packet.overloads() if packet is not None else ():
                overload = getattr(packet, variant)
                if _may_run(overload):
                    yield overload


def _may_run(overload: Any) -> bool:
    schema = overload._schema
    return (
        not schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in overload.tags
        and not _CHANGES_ITS_ARGUMENTS.search(schema.name)
        and len(schema.returns) > 0
        and str(schema.returns[0].type) in ("Tensor", "List[Tensor]")
    )


def _differentiable(overload: Any, edges: int) -> tuple[str, ...] | None:
    """Return the names of the arguments that a node with so many edges has them for."""
    arguments = overload._schema.arguments
    if arguments and str(arguments[0].type) == "List[Tensor]":
        return tuple(f"{arguments[0].name}.{index}" for index in range(edges))
    names = [
        argument.name
        for argument in arguments
        if str(argument.type) in _TENSOR_TYPES and argument.name not in _NEVER_DIFFERENTIABLE
    ]
    if len(names) < edges or not _MAYBE_DIFFERENTIABLE.issuperset(names[edges:]):
        return None
    return tuple(names[:edges])


def _types_fit(overload: Any, saved: Saved) -> bool:
    for argument in overload._schema.arguments:
        value = saved.get(argument.name)
        if value is None or isinstance(value, tuple):
            continue
        if isinstance(value, Tensor) != (str(argument.type) in _TENSOR_TYPES):
            return False
    return True


def _missing(overload: Any, names: tuple[str, ...], saved: Saved) -> int:
    first_names = {name.partition(".")[0] for name in names}
    return sum(
        not argument.has_default_value() and argument.name not in saved and argument.name not in first_names
        for argument in overload._schema.arguments
    )


def _arguments(
    operator: Operator, saved: Saved, operands: Sequence[Tensor | None], shapes: Sequence[tuple[tuple[int, ...], Any]]
) -> tuple[list[Any], dict[str, Any]] | None:
    arguments = operator.overload._schema.arguments
    by_name: dict[str, Any] = dict(zip(operator.names, operands, strict=True))
    if arguments and str(arguments[0].type) == "List[Tensor]":
        by_name = {arguments[0].name: list(operands)}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in arguments:
        name = argument.name
        if name in by_name:
            value = by_name[name]
            unknown = any(v is None for v in value) if isinstance(value, list) else value is None
            if unknown and not (str(argument.type) == "Optional[Tensor]" and name in saved and saved[name] is None):
                return None
        elif name in saved:
            value = _signed(saved[name])
            if value is None and str(argument.type) == "Tensor":
                return None
        elif name in ("size", "shape", "dtype") and len(shapes) == 1:
            # No derivative needs them, but they are what the result has.
            value = shapes[0][1] if name == "dtype" else list(shapes[0][0])
        elif argument.has_default_value():
            value = argument.default_value
        else:
            return None
        if argument.kwarg_only:
            keywords[name] = value
        else:
            positional.append(value)
    return positional, keywords


def _signed(value: Any) -> Any:
    """Return integers as they were: negative ones come back from a node as large ones."""
    if isinstance(value, tuple):
        return [_signed(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= _SIGNED_LIMIT:
        return value - 2 * _SIGNED_LIMIT
    return value
