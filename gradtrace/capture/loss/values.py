"""The values of the loss code's forward pass, as far as the graph still has them before backward runs.

A node does not keep what it computed. But a consumer may have kept it, the node itself may need it for its
derivative, the caller may have it, or it can be computed again from operands that are known. Nothing is written,
and what the user's own hooks on saved tensors would have to unpack is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.capture.graph import Edge, edge_of
from gradtrace.capture.loss.ops import Operator, evaluate, operator_of
from gradtrace.capture.loss.region import is_leaf
from gradtrace.trace.sent import let_pass

_MOST_READ = 2**32
"""Elements of one loss whose finiteness is looked at."""
_MOST_COMPUTED = 2**27
"""Elements of one loss that are computed again, and held until the look is over."""

_SUFFIX = re.compile(r"Backward\d*$")
_PASS_ON = (
    "Add|Sub|Rsub|Neg|Mul|Mean|Sum|Stack|Cat|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|Permute|Transpose|T|"
    "Clone|ToCopy|Abs|Alias|Split|Unbind|Repeat"
)
_ONLY_MOVE = (
    "Neg|Stack|Cat|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|Permute|Transpose|T|Clone|Abs|Alias|Split|"
    "Unbind|Repeat|Select|Slice|Index|IndexSelect|Gather|MaskedSelect|Take|Narrow|AsStrided|Relu|Max|Min|Amax|Amin|"
    "Maximum|Minimum"
)
KEEPS_BAD = frozenset(_PASS_ON.split("|"))
"""Operators whose result is non-finite whenever an operand is."""
KEEPS_FINITE = frozenset(_ONLY_MOVE.split("|"))
"""Operators whose result consists of elements of their operands."""


class Known(NamedTuple):
    """What is known of the value at a gradient edge: the tensor, or only whether it is finite, or nothing."""

    value: Tensor | None = None
    finite: bool | None = None


class Operand(NamedTuple):
    """An operand of a node: ``edge`` is None where no gradient flows to it."""

    name: str
    edge: Edge | None
    value: Tensor | None
    finite: bool | None


def operation(node: Any) -> str:
    """Return the name of a node's operation: Div for DivBackward0."""
    return _SUFFIX.sub("", node.name())


class Values:
    """Looks up, or computes, values at the edges of a loss.

    ``nodes`` are those of the loss in order of birth, ``losses`` the tensors that backward starts from. ``known``
    says what the caller knows of other edges, such as the model's outputs. ``is_finite`` measures a tensor; None
    means that it cannot. To be used in ``quiet``, before the graph is freed; holds nodes and values.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        losses: Iterable[Tensor],
        known: Callable[[Edge], Known],
        is_finite: Callable[[Tensor], bool | None],
    ) -> None:
        self._nodes = nodes
        self._region = set(nodes)
        self._losses = list(losses)
        self._known = known
        self._is_finite = is_finite
        self._to_read = _MOST_READ
        self._to_compute = _MOST_COMPUTED
        self._saved: dict[Any, dict[str, Any]] = {}
        self._computed: dict[Any, tuple[Tensor, ...] | None] = {}
        self._verdicts: dict[Edge, bool | None] = {}

    def holds(self, node: Any) -> bool:
        """Whether a node is part of the loss code."""
        return node in self._region

    def saved(self, node: Any) -> dict[str, Any]:
        """Return what a node has kept, by argument name."""
        if node not in self._saved:
            self._saved[node] = dict(saved_values(node))
        return self._saved[node]

    def operator(self, node: Any) -> Operator | None:
        """Return the operator that made a node."""
        return operator_of(node.name(), len(node.next_functions), self.saved(node))

    def operands(self, node: Any) -> list[Operand]:
        """Return a node's operands, those of no gradient as far as they were kept."""
        edges = _edges(node)
        saved = self.saved(node)
        operator = self.operator(node)
        names = operator.names if operator is not None else tuple(str(i) for i in range(len(edges)))
        found = [self._operand(name, edge, saved) for name, edge in zip(names, edges, strict=True)]
        arguments = operator.overload._schema.arguments if operator is not None else ()
        others = [argument.name for argument in arguments if argument.name not in names]
        return found + [self._operand(name, None, saved) for name in others if isinstance(saved.get(name), Tensor)]

    def used(self, node: Any) -> list[Edge]:
        """Return the edges over which something that is not known to be finite can have come to a node's result."""
        edges = _edges(node)
        selects = {"Where": ("condition", (True, False)), "MaskedFill": ("mask", (False,))}.get(operation(node))
        mask = self.saved(node).get(selects[0]) if selects is not None else None
        if selects is not None and isinstance(mask, Tensor):
            pairs = zip(edges, selects[1], strict=False)
            return [edge for edge, side in pairs if edge is not None and self._has_bad(edge, mask == side)]
        return [edge for edge in edges if edge is not None]

    def value(self, edge: Edge) -> Tensor | None:
        """Return the value at an edge, detached; None where it is not known."""
        value = self._kept.get(edge)
        if value is None:
            value = _without_elements(edge)
        if value is None and edge[0] not in self._region:
            return self._from_outside(edge)
        if value is None:
            results = self._compute(edge[0])
            value = results[edge[1]] if results is not None and edge[1] < len(results) else None
        return value

    def finite(self, edge: Edge) -> bool | None:
        """Return whether the value at an edge is finite; None where that is not known."""
        if edge not in self._verdicts:
            self._verdicts[edge] = self._find_out(edge)
        return self._verdicts[edge]

    # Parts --------------------------------------------------------------------------------------------------

    @cached_property
    def _kept(self) -> dict[Edge, Tensor]:
        """The values that are tensors somewhere: the losses, and what nodes have kept."""
        kept: dict[Edge, Tensor] = {}
        for tensor in self._losses:
            _keep(kept, tensor)
        for node in self._nodes:
            for tensor in self.saved(node).values():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    _keep(kept, tensor)
        return {edge: tensor.detach() for edge, tensor in kept.items() if is_plain(tensor)}

    def _operand(self, name: str, edge: Edge | None, saved: dict[str, Any]) -> Operand:
        if edge is not None:
            return Operand(name, edge, self.value(edge), self.finite(edge))
        value = saved.get(name)
        if not isinstance(value, Tensor) or not is_plain(value):
            return Operand(name, None, None, None)
        return Operand(name, None, value, self._measured(value))

    def _find_out(self, edge: Edge) -> bool | None:
        node = edge[0]
        if node not in self._region:
            finite = self._known(edge).finite
            if finite is not None:
                return finite
        value = self.value(edge)
        if value is not None:
            return self._measured(value)
        return self._inferred(node) if node in self._region else None

    def _has_bad(self, edge: Edge, mask: Tensor) -> bool:
        """Whether something where ``mask`` is true is non-finite, or not known to be finite."""
        value = self.value(edge)
        if value is None:
            return self.finite(edge) is not True
        return self._measured(torch.where(mask, value, 0)) is not True

    def _inferred(self, node: Any) -> bool | None:
        """Tell from the operands whether a value that is not there is finite."""
        edges = _edges(node)
        verdicts = [None if edge is None else self.finite(edge) for edge in edges]
        if False in verdicts and operation(node) in KEEPS_BAD:
            return False
        if verdicts and all(verdicts) and operation(node) in KEEPS_FINITE:
            return True
        return None

    def _measured(self, value: Tensor) -> bool | None:
        if not (value.is_floating_point() or value.is_complex()):
            return True
        self._to_read -= value.numel()
        return self._is_finite(value) if self._to_read >= 0 else None

    def _compute(self, node: Any) -> tuple[Tensor, ...] | None:
        if node not in self._computed:
            self._computed[node] = self._evaluated(node)
        return self._computed[node]

    def _evaluated(self, node: Any) -> tuple[Tensor, ...] | None:
        saved = self.saved(node)
        operator = self.operator(node)
        if operator is None:
            return None
        operands: list[Tensor | None] = []
        for name, edge in zip(operator.names, _edges(node), strict=True):
            value = saved.get(name) if edge is None else self.value(edge)
            operands.append(value if isinstance(value, Tensor) and is_plain(value) else None)
        self._to_compute -= sum(math.prod(data.shape) for data in node._input_metadata)
        return evaluate(operator, node, saved, operands) if self._to_compute >= 0 else None

    def _from_outside(self, edge: Edge) -> Tensor | None:
        value = edge[0].variable if is_leaf(edge[0]) else self._known(edge).value
        try:
            # Changed in place, it is the value at another edge by now.
            return value.detach() if value is not None and is_plain(value) and edge_of(value) == edge else None
        except RuntimeError as error:
            let_pass(error)
            return None


def is_plain(tensor: Tensor) -> bool:
    """Whether operations on a tensor are torch's own: those of a DTensor may wait for other ranks."""
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def _edges(node: Any) -> list[Edge | None]:
    return [None if step[0] is None else (step[0], step[1]) for step in node.next_functions]


def _keep(kept: dict[Edge, Tensor], tensor: Tensor) -> None:
    try:
        edge = edge_of(tensor)
    except RuntimeError as error:  # a view whose base was changed in place
        let_pass(error)
        return
    if edge is not None:
        kept.setdefault(edge, tensor)


def saved_values(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a node has kept for its derivative, by argument name, as far as no hook of the user's is asked."""
    for attribute in dir(node):
        if not attribute.startswith("_saved_"):
            continue
        name = attribute.removeprefix("_saved_")
        try:
            raw = getattr(node, f"_raw_saved_{name}", None)
            raws = raw if isinstance(raw, (tuple, list)) else (raw,)
            # The user's hooks may bring it back from a disk, or compute it again.
            if all(r is None or r.unpack_hook is None for r in raws):
                yield name, getattr(node, attribute)
        except (RuntimeError, AttributeError) as error:  # changed in place since, or freed
            let_pass(error)
            continue


def _without_elements(edge: Edge) -> Tensor | None:
    """Return the value at an edge that has no elements: its shape is all there is to know."""
    data = edge[0]._input_metadata[edge[1]]
    shape = tuple(data.shape)
    return torch.empty(shape, dtype=data.dtype, device=data.device) if 0 in shape else None
