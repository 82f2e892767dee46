"""The loss code as a part of the autograd graph: the nodes between a loss and the outputs of the model.

Only walks; what is to be done with the nodes is the business of others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.graph import Edge, edge_of
from gradtrace.trace.sent import let_pass

LIMIT = 20_000
"""Nodes of a loss that is looked at; a double backward has as many as the model itself."""

Interval = tuple[int, int]
"""Sequence numbers from the first, included, to the last, excluded, that were given out in a module call."""

_LEAF = "torch::autograd::AccumulateGrad"


def start_of(output: Any) -> Edge | None:
    """Return where the backward pass of ``output``, a tensor or a gradient edge, starts; None for a leaf."""
    if isinstance(output, torch.autograd.graph.GradientEdge):
        return output.node, output.output_nr
    try:
        return edge_of(output) if isinstance(output, Tensor) and output.grad_fn is not None else None
    except RuntimeError as error:  # a view that torch gives up, since its base was changed in place
        let_pass(error)
        return None


def loss_region(outputs: Iterable[Any], inside: Iterable[Interval], limit: int = LIMIT) -> list[Any] | None:
    """Return the nodes that were made outside of every module call, in order of birth; None if over ``limit``.

    ``outputs`` are what the backward pass starts from, ``inside`` the intervals of this thread's outermost module
    calls. Nodes of a double backward count as outside, wherever the node is whose backward made them.
    """
    within = _Within(inside)
    seen: set[Any] = set()
    stack = [edge[0] for edge in map(start_of, outputs) if edge is not None]
    nodes: list[Any] = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if within(node) or is_leaf(node):
            continue
        nodes.append(node)
        if len(nodes) > limit:
            return None
        stack.extend(step[0] for step in node.next_functions)
    nodes.sort(key=lambda node: node._sequence_nr())
    return nodes


def is_leaf(node: Any) -> bool:
    """Whether a gradient ends here, at a parameter or an input."""
    return bool(node.name() == _LEAF)


def bare_name(node: Any) -> str:
    """Return a node's name as people meet it: CopySlices for torch::autograd::CopySlices."""
    return str(node.name()).rpartition("::")[2]


class _Within:
    """Whether a node was made in a module call."""

    def __init__(self, inside: Iterable[Interval]) -> None:
        intervals: Sequence[Interval] = sorted(inside)
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]

    def __call__(self, node: Any) -> bool:
        born = node._sequence_nr()
        index = bisect_right(self._starts, born) - 1
        if index < 0 or born >= self._ends[index]:
            return False
        # A thread of the engine has numbers of its own, which tell nothing here.
        return "parent_" not in node.metadata
