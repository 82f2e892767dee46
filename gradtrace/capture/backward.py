"""The gradients at the boundaries of module calls, as hooks on autograd nodes: the engine ``graph``.

The hooks live and die with the graph. When backward runs at all is the business of ``backward_watch.py``.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.boundaries import Found
from gradtrace.capture.calls import Frame
from gradtrace.capture.graph import Edge, Entrance, GraphMap, Step, sequence_number
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.replay.kept import Alive
from gradtrace.capture.session import Session, quiet

Arrived = Sequence[Tensor | None]


_LOST_VIEW = "gradient of a view whose base was changed in place"


class _Thread(threading.local):
    """The graph of the forward pass that one thread is in."""

    def __init__(self) -> None:
        self.map = GraphMap()


class Watched:
    """The backward boundaries of one outermost call: how many there are and how many gradients reached."""

    __slots__ = ("asked", "fired")

    def __init__(self) -> None:
        self.asked = 0
        self.fired: set[int] = set()

    def expect(self) -> int:
        """Return the number of a new boundary."""
        self.asked += 1
        return self.asked

    @property
    def never_fired(self) -> int:
        """Boundaries that no gradient reached, though others of the same call were reached."""
        return self.asked - len(self.fired) if self.fired else 0


class _Inside:
    """What an output's gradient owes to the call's own use of that output, in the pass in flight."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total: Tensor | None = None


class _Place:
    """Where a gradient belongs."""

    __slots__ = ("alive", "call", "entry", "inside", "micro_step", "number", "path", "watched")

    def __init__(self, frame: Frame, path: str, watched: Watched, inside: _Inside | None = None) -> None:
        self.inside = inside
        self.alive = frame.alive
        self.entry: ModuleEntry = frame.entry
        self.call = frame.call
        self.micro_step = frame.micro_step
        self.path = path
        self.watched = watched
        self.number = watched.expect()


class _Sum:
    """A call's contribution to an input's gradient, which may flow over several edges.

    ``missing`` counts down the edges that the backward pass in flight has not been over yet.
    """

    __slots__ = ("edges", "missing", "place", "total")

    def __init__(self, place: _Place, edges: int) -> None:
        self.place = place
        self.edges = self.missing = edges
        self.total: Tensor | None = None


class GraphGradients:
    """Engine ``graph``: the backward boundaries of calls as hooks on autograd nodes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread = _Thread()
        self._watched: list[Watched] = []
        self._partial: list[_Sum] = []
        self._insides: list[_Inside] = []
        self._on_arrival = session.guarded(self._arrived)
        self._on_leaving = session.guarded(self._left)
        self._on_departure = session.guarded(self._departed)
        self._on_own_use = session.guarded(self._used)
        self._on_passing = session.guarded(self._passed)
        self._on_output_gradient = session.guarded(self._output_reached)
        self.visits = 0

    def call_begins(self, frame: Frame, inputs: Found, *, grad_mode: bool) -> None:
        """Take the inputs' edges before an in-place operation can move them."""
        if grad_mode:
            try:
                frame.input_edges = self._thread.map.edges_of(inputs)
            except RuntimeError:
                self._session.unmeasured[_LOST_VIEW] += 1
        frame.start = sequence_number()

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """Put hooks on the nodes over which the call's gradients enter and leave."""
        arrivals = self._made_here(frame, outputs)
        if not arrivals:
            return
        graph = self._thread.map
        before = graph.visits
        is_new = len(arrivals) == 1 and graph.is_new(next(iter(arrivals)))
        region = graph.region(list(arrivals), frame.input_edges, frame.start)
        self.visits += graph.visits - before
        if not frame.entry.selected and frame.alive is None:
            return
        if outermost.watched is None:
            outermost.watched = Watched()
            if outermost.phase == "forward":
                self._watched.append(outermost.watched)
        entrances = region.entrances(frame.input_edges)
        if not frame.entry.selected:
            entrances = []  # what arrives is kept for a replay, and that is all
        if is_new and len(entrances) == 1 and entrances[0].source in arrivals:
            self._watch_node(frame, outermost.watched, arrivals, entrances[0])
            return
        insides = self._watch_own_uses(region.own_uses)
        for node, numbers in arrivals.items():
            places = [(n, _Place(frame, path, outermost.watched, insides.get((node, n)))) for n, path in numbers]
            graph.on_arrival(node, functools.partial(self._on_arrival, places))
        self._watch_inputs(frame, outermost.watched, entrances, region.certain)

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
        node.register_prehook(functools.partial(self._on_output_gradient, frame.alive, number, path))

    def _output_reached(self, alive: Alive, number: int, path: str, gradients: Arrived) -> None:
        gradient = gradients[number]
        if gradient is not None:
            alive.kept.gradient_arrived(path, gradient)

    def outermost_ended(self) -> None:
        """Drop the nodes of the pass."""
        self._thread.map.clear()

    def backward_ended(self) -> None:
        """Record the sums of which some edges were not part of the pass."""
        partial, self._partial = self._partial, []
        for total in partial:
            self._complete(total)
        insides, self._insides = self._insides, []
        for inside in insides:
            inside.total = None

    def never_fired(self) -> int:
        """Return how many boundaries of the step no gradient reached, and start counting anew."""
        watched, self._watched = self._watched, []
        return sum(w.never_fired for w in watched)

    def _made_here(self, frame: Frame, outputs: Found) -> dict[Any, list[tuple[int, str]]]:
        """Return the nodes that made the outputs inside of the call, with the outputs' numbers and paths."""
        arrivals: dict[Any, list[tuple[int, str]]] = {}
        for path, tensor in outputs:
            try:
                node = tensor.grad_fn
            except RuntimeError:
                self._session.unmeasured[_LOST_VIEW] += 1
                continue
            # Neither a leaf, nor an input handed through, nor a tensor made before is this call's boundary.
            if node is None or node._sequence_nr() < frame.start or (node, tensor.output_nr) in frame.input_edges:
                continue
            arrivals.setdefault(node, []).append((tensor.output_nr, path))
        return arrivals

    def _watch_node(
        self, frame: Frame, watched: Watched, arrivals: dict[Any, list[tuple[int, str]]], entrance: Entrance
    ) -> None:
        """See both sides of a call that is a single node (a layer without modules inside, mostly) by one hook."""
        ((node, numbers),) = arrivals.items()
        places = [(number, _Place(frame, path, watched)) for number, path in numbers]
        leaving = _Place(frame, entrance.path, watched)
        node.register_hook(functools.partial(self._on_passing, places, entrance.slot, leaving))

    def _watch_own_uses(self, own_uses: list[Step]) -> dict[Edge, _Inside]:
        """Keep apart what comes to the outputs from inside of the call: it is not the call's grad_output."""
        insides: dict[Edge, _Inside] = {}
        for node, slot, edge in own_uses:
            inside = insides.setdefault(edge, _Inside())
            node.register_hook(functools.partial(self._on_own_use, slot, inside))
        return insides

    def _watch_inputs(self, frame: Frame, watched: Watched, entrances: list[Entrance], certain: bool) -> None:
        edges = Counter(entrance.path for entrance in entrances)
        sums = {path: _Sum(_Place(frame, path, watched), count) for path, count in edges.items()}
        by_node: dict[Any, list[tuple[int, _Sum]]] = defaultdict(list)
        for source, index, path, target in entrances:
            total = sums[path]
            by_node[source].append((index, total))
            if not certain and edges[path] > 1:
                edges[path] = 1  # once is enough
                self._thread.map.before_arrival(target[0], functools.partial(self._on_departure, total))
        for node, targets in by_node.items():
            node.register_hook(functools.partial(self._on_leaving, targets))

    # What the hooks call ------------------------------------------------------------------------------------

    def _arrived(self, places: list[tuple[int, _Place]], gradients: Arrived) -> None:
        for number, place in places:
            gradient = gradients[number]
            if gradient is not None and place.inside is not None:
                gradient = self._from_outside(gradient, place.inside)
                place.watched.fired.add(place.number)
            if gradient is not None:
                if place.entry.selected:
                    self._record(place, "grad_output", gradient)
                if place.alive is not None:
                    place.alive.kept.gradient_arrived(place.path, gradient)

    def _used(self, slot: int, inside: _Inside, gradients: Arrived, _: Arrived) -> None:
        gradient = gradients[slot]
        if gradient is None or not self._session.capturing:
            return
        if inside.total is None:
            self._insides.append(inside)
        with quiet():
            inside.total = gradient if inside.total is None else inside.total + gradient

    def _from_outside(self, gradient: Tensor, inside: _Inside) -> Tensor | None:
        """Return the part of an output's gradient that the call's own use of it does not explain."""
        own, inside.total = inside.total, None
        if own is None:
            return gradient
        if own is gradient:
            return None
        with quiet():
            return torch.where(own.isfinite(), gradient - own, 0)

    def _passed(
        self, arriving: list[tuple[int, _Place]], slot: int, leaving: _Place, after: Arrived, before: Arrived
    ) -> None:
        self._arrived(arriving, before)
        gradient = after[slot]
        if gradient is not None:
            self._record(leaving, "grad_input", gradient)

    def _left(self, targets: list[tuple[int, _Sum]], gradients: Arrived, _: Arrived) -> None:
        for slot, total in targets:
            gradient = gradients[slot]
            if total.edges > 1:
                self._add(total, gradient)
            elif gradient is not None:
                self._record(total.place, "grad_input", gradient)

    def _add(self, total: _Sum, gradient: Tensor | None) -> None:
        if total.missing == total.edges:
            self._partial.append(total)
        total.missing -= 1
        if gradient is not None:
            with quiet():
                total.total = gradient if total.total is None else total.total + gradient
        if total.missing == 0:
            self._complete(total)

    def _departed(self, total: _Sum, _: Arrived) -> None:
        self._complete(total)

    def _complete(self, total: _Sum) -> None:
        """Record what has been summed up in this pass, if anything is left, and be ready for the next pass."""
        gradient, total.total = total.total, None
        total.missing = total.edges
        if gradient is not None:
            self._record(total.place, "grad_input", gradient)

    def _record(self, place: _Place, tensor: str, gradient: Tensor) -> None:
        place.watched.fired.add(place.number)
        session = self._session
        if not session.capturing:
            return
        detail = session.clock.detail
        entry, path, call, micro = place.entry, place.path, place.call, place.micro_step
        with quiet():
            session.record("backward", entry, tensor, path, gradient, call=call, micro_step=micro, detail=detail)
