"""The backward pass: when it runs, the loss it starts from, and the gradients at the boundaries of calls.

``BackwardWatch`` wraps the one function through which ``backward()`` and ``autograd.grad`` reach the engine.
``GraphGradients`` puts the hooks of the engine ``graph`` on autograd nodes; they live and die with the graph.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.boundaries import Found
from gradtrace.capture.calls import Frame
from gradtrace.capture.graph import Entrance, GraphMap, edge_of, sequence_number
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.session import Session, quiet

Arrived = Sequence[Tensor | None]


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


class _Place:
    """Where a gradient belongs."""

    __slots__ = ("call", "entry", "micro_step", "number", "path", "watched")

    def __init__(self, frame: Frame, path: str, watched: Watched) -> None:
        self.entry: ModuleEntry = frame.entry
        self.call = frame.call
        self.micro_step = frame.micro_step
        self.path = path
        self.watched = watched
        self.number = watched.expect()


class _Sum:
    """A gradient that reaches an input over several edges of one call, until all of them have been seen."""

    __slots__ = ("missing", "place", "total")

    def __init__(self, place: _Place, edges: int) -> None:
        self.place = place
        self.missing = edges
        self.total: Tensor | None = None


class GraphGradients:
    """Engine ``graph``: the backward boundaries of calls as hooks on autograd nodes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread = threading.local()
        self._watched: list[Watched] = []
        self._partial: list[_Sum] = []
        self.visits = 0

    def call_begins(self, frame: Frame, outermost: Frame) -> None:
        """Take the inputs' edges before an in-place operation can move them."""
        frame.start = sequence_number()
        if torch.is_grad_enabled():
            frame.input_edges = self._map().edges_of(frame.inputs)
        frame.inputs = []

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """Put hooks on the nodes over which the call's gradients enter and leave."""
        arrivals: dict[Any, list[tuple[int, str]]] = {}
        for path, tensor in outputs:
            edge = edge_of(tensor) if tensor.grad_fn is not None else None
            # Neither an input handed through nor a tensor made before the call is this call's boundary.
            if edge is None or edge in frame.input_edges or edge[0]._sequence_nr() < frame.start:
                continue
            arrivals.setdefault(edge[0], []).append((edge[1], path))
        if not arrivals:
            return
        graph = self._map()
        before = graph.visits
        entrances = graph.entrances(list(arrivals), frame.input_edges, frame.start)
        self.visits += graph.visits - before
        if not frame.entry.selected:
            return
        if outermost.watched is None:
            outermost.watched = Watched()
            if outermost.phase == "forward":
                self._watched.append(outermost.watched)
        self._watch_outputs(frame, outermost.watched, arrivals, graph)
        self._watch_inputs(frame, outermost.watched, entrances)

    def outermost_ended(self) -> None:
        """Drop the nodes of the pass."""
        self._map().clear()

    def backward_ended(self) -> None:
        """Record the sums of which some edges were not part of the pass."""
        partial, self._partial = self._partial, []
        for total in partial:
            if total.missing and total.total is not None:
                self._record(total.place, "grad_input", total.total)
            total.total = None

    def never_fired(self) -> int:
        """Return how many boundaries of the step no gradient reached, and start counting anew."""
        watched, self._watched = self._watched, []
        return sum(w.never_fired for w in watched)

    def _map(self) -> GraphMap:
        graph: GraphMap | None = getattr(self._thread, "map", None)
        if graph is None:
            graph = self._thread.map = GraphMap()
        return graph

    def _watch_outputs(
        self, frame: Frame, watched: Watched, arrivals: dict[Any, list[tuple[int, str]]], graph: GraphMap
    ) -> None:
        for node, outputs in arrivals.items():
            places = [(number, _Place(frame, path, watched)) for number, path in outputs]
            graph.on_arrival(node, self._session.guarded(functools.partial(self._arrived, places)))

    def _watch_inputs(self, frame: Frame, watched: Watched, entrances: list[Entrance]) -> None:
        edges = Counter(entrance.path for entrance in entrances)
        sums = {path: _Sum(_Place(frame, path, watched), count) for path, count in edges.items()}
        by_node: dict[Any, list[tuple[int, _Sum]]] = defaultdict(list)
        for entrance in entrances:
            by_node[entrance.source].append((entrance.index, sums[entrance.path]))
        for node, targets in by_node.items():
            node.register_hook(self._session.guarded(functools.partial(self._left, targets)))

    def _arrived(self, places: list[tuple[int, _Place]], gradients: Arrived) -> None:
        for number, place in places:
            gradient = gradients[number]
            if gradient is not None:
                self._record(place, "grad_output", gradient)

    def _left(self, targets: list[tuple[int, _Sum]], gradients: Arrived, _: Arrived) -> None:
        for index, total in targets:
            gradient = gradients[index]
            total.missing -= 1
            if total.missing == 0 and total.total is None:
                if gradient is not None:
                    self._record(total.place, "grad_input", gradient)
            else:
                self._add(total, gradient)

    def _add(self, total: _Sum, gradient: Tensor | None) -> None:
        if gradient is not None:
            with quiet():
                total.total = gradient if total.total is None else total.total + gradient
        if total.missing == 0 and total.total is not None:
            self._record(total.place, "grad_input", total.total)
            total.total = None
        elif total not in self._partial:
            self._partial.append(total)

    def _record(self, place: _Place, tensor: str, gradient: Tensor) -> None:
        place.watched.fired.add(place.number)
        session = self._session
        if not session.capturing:
            return
        with quiet():
            session.record(
                "backward",
                place.entry,
                tensor,
                place.path,
                gradient,
                call=place.call,
                micro_step=place.micro_step,
                detail=session.clock.detail,
            )


class BackwardWatch:
    """Sees every backward pass of the process while it is installed."""

    def __init__(self, session: Session, on_end: Callable[[bool], None]) -> None:
        self._session = session
        self._on_end = session.guarded(on_end)
        self._begin = session.guarded(self._backward_starts)
        self._record_returned = session.guarded(self._record_gradients_of_grad)
        self._thread = threading.local()
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        """Stand in for the function through which all backward passes run."""
        original = self._original = torch.autograd._engine_run_backward

        def _engine_run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            depth = getattr(self._thread, "depth", 0)
            if depth or not self._session.active:
                return original(outputs, *args, **kwargs)
            accumulating = bool(kwargs.get("accumulate_grad", False))
            self._begin(outputs, accumulating)
            self._thread.depth = depth + 1
            try:
                result = original(outputs, *args, **kwargs)
            finally:
                self._thread.depth = depth
                self._on_end(accumulating)
            if not accumulating:
                self._record_returned(args, kwargs, result)
            return result

        torch.autograd._engine_run_backward = self._replacement = _engine_run_backward  # type: ignore[assignment]

    def remove(self) -> None:
        """Put torch's own function back, unless somebody has wrapped ours: then ours passes calls on."""
        if torch.autograd._engine_run_backward is self._replacement:
            torch.autograd._engine_run_backward = self._original  # type: ignore[assignment]

    def _backward_starts(self, outputs: Sequence[Any], accumulating: bool) -> None:
        session = self._session
        session.clock.backward_starts()
        if not session.capturing:
            return
        tensors = [t for t in outputs if isinstance(t, Tensor) and (accumulating or t.numel() == 1)]
        with quiet():
            for index, tensor in enumerate(tensors):
                path = str(index) if len(tensors) > 1 else ""
                session.record("loss", None, "loss", path, tensor, detail=session.clock.detail)

    def _record_gradients_of_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record what ``autograd.grad`` returned for known parameters: it reaches no ``.grad``."""
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        session = self._session
        if not session.capturing:
            return
        with quiet():
            for tensor, gradient in zip(inputs, result, strict=False):
                entry = session.names.parameter(tensor) if isinstance(tensor, Tensor) else None
                if entry is None or gradient is None or not entry.owner.selected:
                    continue
                session.record("backward", entry.owner, "grad", entry.name, gradient, detail=session.clock.detail)
