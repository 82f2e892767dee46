"""What happens when a gradient comes by a boundary: the hooks on autograd nodes end here.

Which nodes get hooks is decided in ``backward.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.capture.frame import Frame
from gradtrace.capture.replay.kept import Alive
from gradtrace.capture.session import Session, be_quiet, quiet
from gradtrace.capture.sites import Site

Arrived = Sequence[Tensor | None]


class Watched:
    """The backward boundaries of one outermost call: how many there are and how many gradients reached."""

    __slots__ = ("asked", "fired")

    def __init__(self) -> None:
        self.asked = self.fired = 0

    @property
    def never_fired(self) -> int:
        """Boundaries that no gradient reached, though others of the same call were reached."""
        return self.asked - self.fired if self.fired else 0


class Inside:
    """What an output's gradient owes to the call's own use of that output, in the pass in flight."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total: Tensor | None = None


class Place:
    """Where a gradient belongs: the site of its record, and the call that it is of."""

    __slots__ = ("fired", "frame", "inside", "site", "watched")

    def __init__(self, frame: Frame, site: Site, watched: Watched, inside: Inside | None = None) -> None:
        self.frame = frame
        self.site = site
        self.watched = watched
        self.inside = inside
        self.fired = False
        watched.asked += 1

    def reached(self) -> None:
        """Count the boundary as one that a gradient has reached, which is done once."""
        self.fired = True
        self.watched.fired += 1


class Sum:
    """A call's contribution to an input's gradient, which may flow over several edges.

    ``missing`` counts down the edges that the backward pass in flight has not been over yet.
    """

    __slots__ = ("edges", "missing", "place", "total")

    def __init__(self, place: Place, edges: int) -> None:
        self.place = place
        self.edges = self.missing = edges
        self.total: Tensor | None = None


Arriving = list[tuple[int, Place]]
"""The gradients before a node that are an output's: their numbers and where they belong."""


class Hooks:
    """What the hooks call; errors stay here. Hooks live as long as their graph, longer than a recording maybe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._partial: list[Sum] = []
        self._insides: list[Inside] = []
        self.on_arrival = session.guarded(self._arrived)
        self.on_leaving = session.guarded(self._left)
        self.on_departure = session.guarded(self._departed)
        self.on_own_use = session.guarded(self._used)
        self.on_passing = session.guarded(self._passed)
        self.on_output_gradient = session.guarded(self._output_reached)

    def backward_ended(self) -> None:
        """Record the sums of which some edges were not part of the pass."""
        partial, self._partial = self._partial, []
        with quiet():
            for total in partial:
                self._complete(total)
        insides, self._insides = self._insides, []
        for inside in insides:
            inside.total = None

    def _passed(self, arriving: Arriving, slot: int, leaving: Place, after: Arrived, before: Arrived) -> None:
        """A node that is a whole call has run."""
        loud = be_quiet()
        try:
            self._see_arriving(arriving, before)
            gradient = after[slot]
            if gradient is not None:
                self._see(leaving, gradient)
        finally:
            if loud is not None:
                loud()

    def _arrived(self, arriving: Arriving, gradients: Arrived) -> None:
        with quiet():
            self._see_arriving(arriving, gradients)

    def _see_arriving(self, arriving: Arriving, gradients: Arrived) -> None:
        for number, place in arriving:
            gradient = gradients[number]
            if gradient is not None and place.inside is not None:
                gradient = _from_outside(gradient, place.inside)
                if not place.fired:
                    place.reached()
            if gradient is None:
                continue
            if place.frame.entry.selected:
                self._see(place, gradient)
            if place.frame.alive is not None:
                place.frame.alive.kept.gradient_arrived(place.site.path, gradient)

    def _output_reached(self, alive: Alive, number: int, path: str, gradients: Arrived) -> None:
        gradient = gradients[number]
        if gradient is not None:
            alive.kept.gradient_arrived(path, gradient)

    def _used(self, slot: int, inside: Inside, gradients: Arrived, _: Arrived) -> None:
        gradient = gradients[slot]
        if gradient is None:
            return
        if inside.total is None:
            self._insides.append(inside)
        with quiet():
            inside.total = gradient if inside.total is None else inside.total + gradient

    def _left(self, targets: list[tuple[int, Sum]], gradients: Arrived, _: Arrived) -> None:
        with quiet():
            for slot, total in targets:
                gradient = gradients[slot]
                if total.edges > 1:
                    self._add(total, gradient)
                elif gradient is not None:
                    self._see(total.place, gradient)

    def _add(self, total: Sum, gradient: Tensor | None) -> None:
        if total.missing == total.edges:
            self._partial.append(total)
        total.missing -= 1
        if gradient is not None:
            total.total = gradient if total.total is None else total.total + gradient
        if total.missing == 0:
            self._complete(total)

    def _departed(self, total: Sum, _: Arrived) -> None:
        with quiet():
            self._complete(total)

    def _complete(self, total: Sum) -> None:
        """Record what has been summed up in this pass, if anything is left, and be ready for the next pass."""
        gradient, total.total = total.total, None
        total.missing = total.edges
        if gradient is not None:
            self._see(total.place, gradient)

    def _see(self, place: Place, gradient: Tensor) -> None:
        if not place.fired:
            place.reached()
        session = self._session
        if session.capturing:
            site, frame, detail = place.site, place.frame, session.clock.detail
            session.see(site if detail is None else site.remarked(detail), gradient, frame.call, frame.micro_step)


def _from_outside(gradient: Tensor, inside: Inside) -> Tensor | None:
    """Return the part of an output's gradient that the call's own use of it does not explain."""
    own, inside.total = inside.total, None
    if own is None:
        return gradient
    if own is gradient:
        return None
    return torch.where(own.isfinite(), gradient - own, 0)
