"""The autograd graph: where a module call's gradients enter and leave.

``grad_output`` of a call is what arrives at the node that made the output, less what the call itself sends
there: it may go on using its output, as a model that returns its logits with the loss does. ``grad_input`` is
the call's own contribution to the gradient of its input: what flows over those edges that lead from a node
born inside of the call to the input's gradient edge. A hook on the input tensor would be wrong: it sees the sum
over all consumers and so accuses the innocent branch of a residual.

The nodes inside of a call are found by walking back from its outputs, no further than nodes that are older
than the call. A call inside of it has been walked already: its result stands in for its nodes, so that the
whole is linear in the number of nodes however deep the modules are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Edge = tuple[Any, int]
"""A gradient edge: an autograd node and the number of its input (of the forward's output)."""

Callback = Callable[[Sequence[Tensor | None]], None]

LEAF_SEQUENCE = 2**64 - 1
"""Sequence number of AccumulateGrad nodes."""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread will get."""


Step = tuple[Any, int, Edge]
"""A way out of a call: the node that it starts from, the number of the node's edge, and where that leads."""


class Entrance(NamedTuple):
    """An edge over which a call's own contribution to an input's gradient flows."""

    source: Any
    slot: int
    path: str
    target: Edge


def edge_of(tensor: Tensor) -> Edge | None:
    """Return the gradient edge of a tensor, None when no gradient flows to it.

    Raises:
        RuntimeError: a view that torch gives up, since its base was changed in place.
    """
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    return _edge_of_leaf(tensor) if node is None else (node, tensor.output_nr)


def _edge_of_leaf(tensor: Tensor) -> Edge:
    edge = torch.autograd.graph.get_gradient_edge(tensor)  # makes and drops a view
    return edge.node, edge.output_nr


class Region(NamedTuple):
    """A call as a part of the graph.

    ``certain`` says whether every backward pass that reaches the call goes over all of ``ways_out``: it need
    not where there are several outputs, here or in a call inside. ``own_uses`` are the edges from inside of the
    call to its own outputs: a mean that is returned, and from which a sample was drawn.
    """

    ways_out: list[Step]
    certain: bool
    own_uses: list[Step]

    def entrances(self, inputs: Mapping[Edge, str]) -> list[Entrance]:
        """Return the edges that lead to ``inputs``."""
        return [Entrance(node, slot, inputs[edge], edge) for node, slot, edge in self.ways_out if edge in inputs]


class _Stop:
    """What is to be done when gradients arrive at a node."""

    __slots__ = ("arrivals", "departures")

    def __init__(self) -> None:
        self.departures: list[Callback] = []
        self.arrivals: list[Callback] = []

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        for callback in self.departures:
            callback(gradients)
        for callback in reversed(self.arrivals):
            callback(gradients)


class GraphMap:
    """The calls of one thread's forward pass as regions of the autograd graph.

    Holds nodes of the pass in flight; ``clear`` drops them when the outermost call returns. ``visits`` counts
    the nodes that were looked at, over the run.
    """

    def __init__(self) -> None:
        self.visits = 0
        self._regions: dict[Any, Region] = {}
        self._stops: dict[Any, _Stop] = {}
        self._leaf_edges: set[Edge] = set()

    def clear(self) -> None:
        """Forget the nodes of the pass."""
        self._regions.clear()
        self._stops.clear()
        self._leaf_edges.clear()

    def edges_of(self, found: Iterable[tuple[str, Tensor]]) -> dict[Edge, str]:
        """Return the gradient edges of a call's inputs with their paths; the first path of an edge counts."""
        edges: dict[Edge, str] = {}
        for path, tensor in found:
            if not tensor.requires_grad:
                continue
            node = tensor.grad_fn
            if node is None:
                edge = _edge_of_leaf(tensor)
                self._leaf_edges.add(edge)
            else:
                edge = node, tensor.output_nr
            edges.setdefault(edge, path)
        return edges

    def region(self, outputs: Sequence[Any], inputs: Mapping[Edge, str], start: int) -> Region:
        """Find out what lies inside of a call, and remember it.

        ``outputs`` are the nodes of the call's outputs; nodes with a sequence number of at least ``start`` were
        born inside of it.
        """
        ways_out: list[Step] = []
        own_uses: list[Step] = []
        certain = len(outputs) == 1
        leaf_edges, regions = self._leaf_edges, self._regions
        ends = set(outputs)
        seen = set(outputs)
        stack = list(outputs)
        visits = 0
        while stack:
            node = stack.pop()
            visits += 1
            known = regions.get(node)
            if known is None:
                steps: Iterable[Step] = [(node, slot, edge) for slot, edge in enumerate(node.next_functions)]
            else:
                steps = known.ways_out
                certain = certain and known.certain
                own_uses += [step for step in known.own_uses if step[2][0] in ends]
            for step in steps:
                target = step[2]
                next_node = target[0]
                if target in inputs:
                    ways_out.append(step)
                elif next_node is None or (born := next_node._sequence_nr()) == LEAF_SEQUENCE:
                    if target in leaf_edges:
                        ways_out.append(step)
                elif born < start:
                    ways_out.append(step)
                else:
                    if next_node in ends:
                        own_uses.append(step)
                    if next_node not in seen:
                        seen.add(next_node)
                        stack.append(next_node)
        self.visits += visits
        return self._remember(outputs, ways_out, own_uses, certain)

    def only_entrance(self, node: Any, inputs: Mapping[Edge, str], start: int) -> Entrance | None:
        """Return the one way out of a call whose only output ``node`` has made, if the call is as simple as most are.

        Then the node itself leads to an input, only once, and else to nothing but parameters, maybe over one more
        node. None says that it takes ``region`` to know.
        """
        if node in self._regions:
            return None
        entrance = None
        for slot, target in enumerate(node.next_functions):
            if target in inputs:
                if entrance is not None:
                    return None
                entrance = Entrance(node, slot, inputs[target], target)
            elif not self._is_parameter(target) and not self._leads_to_parameters(target[0], start):
                return None
        if entrance is not None:
            self.visits += 1
            self._regions[node] = Region([(node, entrance.slot, entrance.target)], True, [])
        return entrance

    def _is_parameter(self, target: Edge) -> bool:
        node = target[0]
        return node is None or (node._sequence_nr() == LEAF_SEQUENCE and target not in self._leaf_edges)

    def _leads_to_parameters(self, node: Any, start: int) -> bool:
        """Whether a node was born inside, as the transpose of a weight is, and all that it leads to are parameters."""
        if node._sequence_nr() < start or node in self._regions:
            return False
        self.visits += 1
        return all(self._is_parameter(target) for target in node.next_functions)

    def _remember(self, outputs: Sequence[Any], ways_out: list[Step], own_uses: list[Step], certain: bool) -> Region:
        # Regions inside may have been left by the same way, where outputs lie behind one another.
        ways_out = ways_out if len(ways_out) < 2 else list(dict.fromkeys(ways_out))
        own_uses = own_uses if len(own_uses) < 2 else list(dict.fromkeys(own_uses))
        region = Region(ways_out, certain, own_uses)
        for node in outputs:
            self._regions[node] = region
        return region

    def on_arrival(self, node: Any, callback: Callback) -> None:
        """Call ``callback`` with the gradients that arrive at ``node``; the last one added is called first.

        An inner call returns, and asks, before the outer one; in backward the outer one comes first.
        """
        self._stop(node).arrivals.append(callback)

    def before_arrival(self, node: Any, callback: Callback) -> None:
        """Call ``callback`` ahead of those of ``on_arrival``: all that lies behind ``node`` has run by then.

        Nothing happens at a leaf: a hook there would outlive the pass.
        """
        if node._sequence_nr() != LEAF_SEQUENCE:
            self._stop(node).departures.append(callback)

    def _stop(self, node: Any) -> _Stop:
        stop = self._stops.get(node)
        if stop is None:
            stop = self._stops[node] = _Stop()
            node.register_prehook(stop)
        return stop
