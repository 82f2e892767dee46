"""Which operation of the loss code made a loss non-finite: judged on the values that ``values.py`` finds.

An operation is blamed when its result is non-finite and no operand is. Where an operand cannot be told, or was
bad though no gradient flows to it (labels, a value made under no_grad), nothing is blamed and that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.graph import Edge
from gradtrace.capture.loss.region import bare_name
from gradtrace.capture.loss.values import KEEPS_BAD, Operand, Values, operation
from gradtrace.capture.operations import births
from gradtrace.capture.operations.births import Birth
from gradtrace.capture.operations.stacks import stack_of
from gradtrace.capture.session import Session
from gradtrace.capture.statistics import Measure, Unmeasurable
from gradtrace.trace.confirmation import SourceLine
from gradtrace.trace.sent import let_pass

_FILLS = frozenset(
    {"MaskedFill", "Where", "IndexFill", "IndexPut", "Fill", "Scatter", "MaskedScatter", "ConstantPadNd"}
)
"""Operations that put a given value into some places and leave the others as they are."""
_SHIFTS = frozenset({"Add", "Sub", "Rsub"})
"""Operations that make no NaN out of finite operands."""


@dataclass
class LossFinding:
    """Why a loss is non-finite.

    ``births`` are in the order in which the operations ran. ``reason`` says what is known where there are none, or
    what is not certain of the first, and ``place`` where that was. ``term`` is the addend of the loss that is
    non-finite, where there are several.
    """

    births: list[Birth] = field(default_factory=list)
    reason: str | None = None
    place: tuple[SourceLine, ...] = ()
    term: str | None = None


def find_births(nodes: Sequence[Any], losses: Iterable[Edge], values: Values, session: Session) -> LossFinding:
    """Return the operations among ``nodes``, which are in order of birth, that made ``losses`` non-finite.

    To be called in ``quiet``, before the graph is freed.
    """
    finding = LossFinding()
    # In this order a value's operands are known before it: nothing goes deep.
    bad = [edge for node in nodes for edge in _results(node) if values.finite(edge) is False]
    path = _path_to(losses, values)
    for edge in bad:
        if edge in path and len(finding.births) < births.MOST:
            _judge(edge, values, session, finding)
    return finding


def _results(node: Any) -> list[Edge]:
    return [(node, index) for index in range(len(node._input_metadata))]


def _path_to(losses: Iterable[Edge], values: Values) -> set[Edge]:
    """Return the edges over which what is not finite, or not known to be, comes to ``losses``.

    What ``where`` or an index has left out does not.
    """
    path: set[Edge] = set()
    pending = list(losses)
    while pending:
        edge = pending.pop()
        if edge not in path and values.holds(edge[0]) and values.finite(edge) is not True:
            path.add(edge)
            pending.extend(values.used(edge[0]))
    return path


def _judge(edge: Edge, values: Values, session: Session, finding: LossFinding) -> None:
    node = edge[0]
    operands = values.operands(node)
    if any(operand.finite is False and operand.edge is not None for operand in operands):
        return
    acquits, doubt = _doubt(edge, operands, values, session)
    is_first = not finding.births
    if not acquits:
        finding.births.extend(_birth(edge, operands, values, session))
    if is_first and (finding.births or finding.reason is None):
        finding.reason, finding.place = doubt, stack_of(node)


def _doubt(edge: Edge, operands: Sequence[Operand], values: Values, session: Session) -> tuple[bool, str | None]:
    """Say what speaks against blaming a node whose result is bad, and whether that acquits it."""
    name = bare_name(edge[0])
    bad = [operand.name for operand in operands if operand.finite is False]
    if bad:
        return True, f"operand {' and '.join(bad)} of {name}, to which no gradient flows, was non-finite already"
    unknown = [operand for operand in operands if operand.finite is None and operand.edge is not None]
    if (unknown and operation(edge[0]) in KEEPS_BAD) or not all(_is_mixed(operand, values) for operand in unknown):
        return True, f"{name} is the first operation whose result is known to be non-finite; what it was given is not"
    if unknown:
        names = " and ".join(operand.name for operand in unknown)
        makers = " and ".join(bare_name(operand.edge[0]) for operand in unknown if operand.edge is not None)
        return False, f"operand {names} of {name} is not known: {makers} made it of finite values and a constant"
    unseen = " and ".join(operand.name for operand in operands if operand.finite is None)
    if unseen and operation(edge[0]) in _SHIFTS and not _may_overflow(edge, operands, values, session):
        return True, f"operand {unseen} of {name}, to which no gradient flows, must have been non-finite already"
    return False, None


def _is_mixed(operand: Operand, values: Values) -> bool:
    """Whether an operand was made of something finite and a constant that no node has kept."""
    if operand.edge is None or not values.holds(operand.edge[0]):
        return False
    node = operand.edge[0]
    parts = values.operands(node)
    return operation(node) in _SHIFTS | _FILLS and all(part.finite is True or part.edge is None for part in parts)


def _may_overflow(edge: Edge, operands: Sequence[Operand], values: Values, session: Session) -> bool:
    """Whether a sum of a finite operand and one that is not known may have been too large for its type."""
    result = _measure(values.value(edge), session)
    given = [measure for operand in operands if (measure := _measure(operand.value, session)) is not None]
    if result is None or result.nan or not given or given[0].min is None or given[0].max is None:
        return False
    return max(-given[0].min, given[0].max) > torch.finfo(given[0].dtype).max / 4


def _birth(edge: Edge, operands: Sequence[Operand], values: Values, session: Session) -> Iterator[Birth]:
    node, index = edge
    measure = _measure(values.value(edge), session)
    if measure is None:
        return
    birth = Birth(bare_name(node), None, None, "output", index, measure, traceback=stack_of(node))
    for operand in operands:
        seen = _measure(operand.value, session)
        if seen is not None:
            birth.operands.append(births.Operand("input", operand.name, seen))
    birth.fill = operation(node) in _FILLS
    yield birth


def _measure(value: Tensor | None, session: Session) -> Measure | None:
    if value is None or value.dtype is torch.bool:
        return None
    try:
        return session.statistics.measure(value)
    except (Unmeasurable, RuntimeError, TypeError) as error:
        let_pass(error)
        return None
