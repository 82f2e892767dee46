"""The gradients at the boundaries of module calls, as hooks on autograd nodes: the engine ``graph``.

The hooks live and die with the graph. When backward runs at all is the business of ``backward_watch.py``; what the
hooks do is in ``places.py``.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from typing import Any

from gradtrace.capture.boundaries import Found
from gradtrace.capture.frame import Frame
from gradtrace.capture.graph import Edge, Entrance, GraphMap, Step, sequence_number
from gradtrace.capture.places import Hooks, Inside, Place, Sum, Watched
from gradtrace.capture.session import Session
from gradtrace.trace.sent import let_pass

_LOST_VIEW = "gradient of a view whose base was changed in place"
_NO_EDGES: dict[Edge, str] = {}
_MOST_WATCHED = 1_000
"""Of a step's outermost calls so many are followed; of older ones it is settled what has reached them."""

Arrivals = dict[Any, list[tuple[int, str]]]
"""The nodes that made a call's outputs, with the outputs' numbers and paths."""


class _Thread(threading.local):
    """The graph of the forward pass that one thread is in."""

    def __init__(self) -> None:
        self.map = GraphMap()


class GraphGradients:
    """Engine ``graph``: the backward boundaries of calls as hooks on autograd nodes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks = Hooks(session)
        self._thread = _Thread()
        self._watched: list[Watched] = []
        self._settled = 0
        """Boundaries of older calls that no gradient has reached."""
        self.visits = 0

    def call_begins(self, frame: Frame, inputs: Found, *, grad_mode: bool) -> None:
        """Take the inputs' edges before an in-place operation can move them."""
        if grad_mode:
            try:
                frame.input_edges = self._thread.map.edges_of(inputs)
            except RuntimeError as error:
                let_pass(error)
                self._session.unmeasured[_LOST_VIEW] += 1
        frame.start = sequence_number()

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """Put hooks on the nodes over which the call's gradients enter and leave."""
        arrivals = self._made_here(frame, outputs)
        if arrivals and not (len(arrivals) == 1 and self._watch_layer(frame, outermost, arrivals)):
            self._watch(frame, outermost, arrivals)
        frame.input_edges = _NO_EDGES  # hooks hold the frame, and nothing may hold nodes

    def watched_call_returns(self, frame: Frame, outputs: Found) -> None:
        """Keep what arrives at an outermost call's outputs for a replay; nothing is recorded.

        Where there are several, one may have been made of another: then what lies inside must be known.
        """
        if frame.alive is None:
            return
        made_here = self._made_here(frame, outputs)
        numbers = [number for numbers in made_here.values() for number in numbers]
        if len(numbers) != 1:
            self.call_returns(frame, frame, outputs)
            return
        (node,), ((number, path),) = made_here, numbers
        node.register_prehook(functools.partial(self._hooks.on_output_gradient, frame.alive, number, path))

    def outermost_ended(self) -> None:
        """Drop the nodes of the pass."""
        self._thread.map.clear()

    def backward_ended(self) -> None:
        """Record the sums of which some edges were not part of the pass."""
        self._hooks.backward_ended()

    def never_fired(self) -> int:
        """Return how many boundaries of the step no gradient reached, and start counting anew."""
        watched, self._watched = self._watched, []
        settled, self._settled = self._settled, 0
        return settled + _never_fired(watched)

    def _watch_layer(self, frame: Frame, outermost: Frame, arrivals: Arrivals) -> bool:
        """See both sides of a call that is a single node (a layer without modules inside, mostly) by one hook.

        Return whether the call is one.
        """
        ((node, numbers),) = arrivals.items()
        graph = self._thread.map
        before = graph.visits
        entrance = graph.only_entrance(node, frame.input_edges, frame.start) if frame.entry.selected else None
        if entrance is None:
            return False
        self.visits += graph.visits - before
        watched = outermost.watched or self._begin_to_watch(outermost)
        sites = frame.sites
        arriving = [(number, Place(frame, sites.grad_output[path], watched)) for number, path in numbers]
        leaving = Place(frame, sites.grad_input[entrance.path], watched)
        node.register_hook(functools.partial(self._hooks.on_passing, arriving, entrance.slot, leaving))
        return True

    def _watch(self, frame: Frame, outermost: Frame, arrivals: Arrivals) -> None:
        graph = self._thread.map
        before = graph.visits
        region = graph.region(list(arrivals), frame.input_edges, frame.start)
        self.visits += graph.visits - before
        selected = frame.entry.selected
        if not selected and frame.alive is None:
            return
        watched = outermost.watched or self._begin_to_watch(outermost)
        insides = self._watch_own_uses(region.own_uses)
        sites = frame.sites.grad_output
        for node, numbers in arrivals.items():
            places = [(n, Place(frame, sites[path], watched, insides.get((node, n)))) for n, path in numbers]
            graph.on_arrival(node, functools.partial(self._hooks.on_arrival, places))
        if selected:  # of other calls what arrives is kept for a replay, and that is all
            self._watch_inputs(frame, watched, region.entrances(frame.input_edges), region.certain)

    def _begin_to_watch(self, outermost: Frame) -> Watched:
        watched = outermost.watched = Watched()
        if outermost.phase == "forward":
            self._watched.append(watched)
            if len(self._watched) > _MOST_WATCHED:
                half = _MOST_WATCHED // 2
                self._settled += _never_fired(self._watched[:half])
                del self._watched[:half]
        return watched

    def _made_here(self, frame: Frame, outputs: Found) -> Arrivals:
        arrivals: Arrivals = {}
        for path, tensor in outputs:
            try:
                node = tensor.grad_fn
            except RuntimeError as error:
                let_pass(error)
                self._session.unmeasured[_LOST_VIEW] += 1
                continue
            # Neither a leaf, nor an input handed through, nor a tensor made before is this call's boundary.
            if node is None or node._sequence_nr() < frame.start:
                continue
            number = tensor.output_nr
            if (node, number) not in frame.input_edges:
                arrivals.setdefault(node, []).append((number, path))
        return arrivals

    def _watch_own_uses(self, own_uses: list[Step]) -> dict[Edge, Inside]:
        """Keep apart what comes to the outputs from inside of the call: it is not the call's grad_output."""
        insides: dict[Edge, Inside] = {}
        for node, slot, edge in own_uses:
            inside = insides.setdefault(edge, Inside())
            node.register_hook(functools.partial(self._hooks.on_own_use, slot, inside))
        return insides

    def _watch_inputs(self, frame: Frame, watched: Watched, entrances: list[Entrance], certain: bool) -> None:
        edges = Counter(entrance.path for entrance in entrances)
        sites = frame.sites.grad_input
        sums = {path: Sum(Place(frame, sites[path], watched), count) for path, count in edges.items()}
        by_node: dict[Any, list[tuple[int, Sum]]] = defaultdict(list)
        for source, index, path, target in entrances:
            total = sums[path]
            by_node[source].append((index, total))
            if not certain and edges[path] > 1:
                edges[path] = 1  # once is enough
                self._thread.map.before_arrival(target[0], functools.partial(self._hooks.on_departure, total))
        for node, targets in by_node.items():
            node.register_hook(functools.partial(self._hooks.on_leaving, targets))


def _never_fired(watched: list[Watched]) -> int:
    return sum(each.never_fired for each in watched)
