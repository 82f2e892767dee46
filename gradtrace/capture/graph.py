"""The autograd graph: where a module call's gradients enter and leave.

``grad_output`` of a call is what arrives at the node that made the output. ``grad_input`` is the call's own
contribution to the gradient of its input: what flows over those edges that lead from a node born inside of the
call to the input's gradient edge. A hook on the input tensor would be wrong: it sees the sum over all
consumers and so accuses the innocent branch of a residual.

The nodes inside of a call are found by walking back from its outputs, no further than nodes that are older
than the call. A call inside of it has been walked already: its result stands in for its nodes, so that the
whole is linear in the number of nodes however deep the modules are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Edge = tuple[Any, int]
"""A gradient edge: an autograd node and the number of its input (of the forward's output)."""

_LEAF_SEQUENCE = 2**64 - 1
"""Sequence number of AccumulateGrad nodes."""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that the next node of this thread will get."""


class Step(NamedTuple):
    """A way out of a call: ``source``'s edge number ``index`` leads to ``target``."""

    source: Any
    index: int
    target: Edge


class Entrance(NamedTuple):
    """An edge over which a call's own contribution to an input's gradient flows."""

    source: Any
    index: int
    path: str


def edge_of(tensor: Tensor) -> Edge | None:
    """Return the gradient edge of a tensor, None when no gradient flows to it."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class GraphMap:
    """The calls of one thread's forward pass as regions of the autograd graph.

    Holds nodes of the pass in flight; ``clear`` drops them when the outermost call returns.
    """

    def __init__(self) -> None:
        self.visits = 0
        self._ways_out: dict[Any, list[Step]] = {}
        self._arrivals: dict[Any, list[Callable[[Sequence[Tensor | None]], None]]] = {}
        self._leaf_edges: set[Edge] = set()

    def clear(self) -> None:
        """Forget the nodes of the pass."""
        self._ways_out.clear()
        self._arrivals.clear()
        self._leaf_edges.clear()

    def edges_of(self, found: Iterable[tuple[str, Tensor]]) -> dict[Edge, str]:
        """Return the gradient edges of a call's inputs with their paths; the first path of an edge counts."""
        edges: dict[Edge, str] = {}
        for path, tensor in found:
            edge = edge_of(tensor)
            if edge is not None and edge not in edges:
                edges[edge] = path
                if tensor.grad_fn is None:
                    self._leaf_edges.add(edge)
        return edges

    def entrances(self, outputs: Sequence[Any], inputs: dict[Edge, str], start: int) -> list[Entrance]:
        """Return the edges that lead from inside of a call to its ``inputs``, and remember its ways out.

        ``outputs`` are the nodes of the call's outputs; nodes with a sequence number of at least ``start`` were
        born inside of it.
        """
        ways_out: dict[Step, None] = {}
        seen = set(outputs)
        stack = list(seen)
        while stack:
            for step in self._steps_from(stack.pop()):
                node = step.target[0]
                if step.target in inputs or self._leads_out(step, start):
                    ways_out[step] = None
                elif node._sequence_nr() != _LEAF_SEQUENCE and node not in seen:
                    seen.add(node)
                    stack.append(node)
        steps = list(ways_out)
        for node in outputs:
            self._ways_out[node] = steps
        return [Entrance(s.source, s.index, inputs[s.target]) for s in steps if s.target in inputs]

    def _leads_out(self, step: Step, start: int) -> bool:
        born = step.target[0]._sequence_nr()
        if born == _LEAF_SEQUENCE:
            return step.target in self._leaf_edges
        return bool(born < start)

    def _steps_from(self, node: Any) -> list[Step]:
        self.visits += 1
        known = self._ways_out.get(node)
        if known is not None:
            return known
        edges = node.next_functions
        return [Step(node, index, edge) for index, edge in enumerate(edges) if edge[0] is not None]

    def on_arrival(self, node: Any, callback: Callable[[Sequence[Tensor | None]], None]) -> None:
        """Call ``callback`` with the gradients that arrive at ``node``; the last one added is called first.

        An inner call returns, and asks, before the outer one; in backward the outer one comes first.
        """
        callbacks = self._arrivals.get(node)
        if callbacks is None:
            callbacks = self._arrivals[node] = []

            def arrive(gradients: Sequence[Tensor | None]) -> None:
                for callback in reversed(callbacks):
                    callback(gradients)

            node.register_prehook(arrive)
        callbacks.append(callback)
