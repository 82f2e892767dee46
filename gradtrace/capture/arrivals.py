"""Gradients as they arrive: one hook on the AccumulateGrad node of every parameter.

After backward a gradient may be gone, be an accumulation that shows an old NaN again, or carry what another
process sent. torch holds these nodes weakly, so they are held here; a node holds its parameter, so nodes go
with the module that they belong to.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.held import TensorEntry
from gradtrace.capture.names import Root
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.statistics import Measure

_MOST_ARRIVED = 64
"""Of the gradients that arrived at one parameter in a step, which may have thousands of passes."""


class _Arrival:
    """A hook on the node of one parameter."""

    __slots__ = ("_device", "_dtype", "_handle", "_node", "_number", "_shape", "parameter", "root")

    def __init__(self, parameter: Tensor, root: Root, hook: Callable[[Sequence[Tensor | None]], None]) -> None:
        self.parameter = parameter
        self.root = root
        self._dtype, self._device, self._shape = parameter.dtype, parameter.device, parameter.shape
        self._number = parameter._cdata
        self._node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._handle = self._node.register_prehook(hook)

    @property
    def fits(self) -> bool:
        """Whether the node may be held on to.

        For a parameter of another type or device torch makes a new one. For another shape, given to it through
        ``.data``, it would do so too if nobody held the old one, whose gradients are refused by now. After
        ``swap_tensors`` it is the node of the other one.
        """
        parameter = self.parameter
        return (
            parameter._cdata == self._number
            and parameter.shape == self._shape
            and parameter.dtype == self._dtype
            and parameter.device == self._device
        )

    def end(self) -> None:
        """Take the hook off; the node may be in a graph that lives on."""
        self._handle.remove()


class Arrivals:
    """Records the gradients of all known parameters as they arrive, and remembers those of the step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrivals: dict[int, _Arrival] = {}
        self._arrived: dict[int, list[Measure]] = {}
        self._roots: weakref.WeakKeyDictionary[Root, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._complete = False
        self._lock = threading.RLock()
        self.any_nonfinite = False
        """Whether a gradient of the step was not finite, or may turn out not to have been."""

    def of(self, parameter: Tensor) -> list[Measure]:
        """Return the gradients that have arrived at a parameter in this step."""
        return self._arrived.get(id(parameter), [])

    def unseen(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters at which nothing has arrived in this step, and the gradients that they have."""
        arrived = self._arrived
        return [(p, gradient) for p in parameters if (gradient := p.grad) is not None and id(p) not in arrived]

    def take(self) -> list[Measure]:
        """Return the gradients that have arrived since this was last asked for, or since the step began."""
        arrived, self._arrived = self._arrived, {}
        return [measure for measures in arrived.values() for measure in measures]

    def forget(self) -> None:
        """Start a new step."""
        self._arrived.clear()
        self.any_nonfinite = False
        self._complete = False

    def call_begins(self) -> None:
        """Let go of nodes that would be in the way of a graph that is about to be built."""
        self._complete = False
        for key, arrival in list(self._arrivals.items()):
            if not arrival.fits:
                self._drop(key)

    def watch(self) -> None:
        """Hook what there is now; asked for before every backward, it is done once for all calls before."""
        with self._lock:  # a backward of another thread waits for its hooks, and none is made twice
            if not self._complete:
                self._complete = True  # first: a call that begins meanwhile says otherwise
                self._hook_all()

    def _hook_all(self) -> None:
        known = set()
        with quiet():
            for entry, parameter in self._session.names.tensors():
                if entry.kind == "param" and _takes_gradients(parameter):
                    key = id(parameter)
                    known.add(key)
                    arrival = self._arrivals.get(key)
                    if arrival is None or not arrival.fits:
                        self._hook(entry, parameter)
        for key in [key for key in list(self._arrivals) if key not in known]:
            self._drop(key)

    def rest(self) -> None:
        """Take all hooks off until ``watch`` is called again."""
        if self._arrivals:
            self.stop()
            self._complete = False

    def stop(self) -> None:
        """Take all hooks off."""
        for key in list(self._arrivals):
            self._drop(key)
        self._roots.clear()

    def _hook(self, entry: TensorEntry, parameter: Tensor) -> None:
        self._drop(id(parameter))  # one that does not fit any more
        root = entry.owner.root
        if self._session.names.parameter(parameter) is None:
            self._session.names.refresh(root)  # put into a module whose parameters have been named before
        hook = self._session.guarded(functools.partial(self._gradient_arrived, entry))
        self._arrivals[id(parameter)] = _Arrival(parameter, root, hook)
        module, known = root.ref(), self._roots.get(root)
        if module is not None and (known is None or known() is not module):
            self._roots[root] = weakref.ref(module, functools.partial(_release, self._arrivals, weakref.ref(root)))

    def _drop(self, key: int) -> None:
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            arrival.end()

    def _gradient_arrived(self, entry: TensorEntry, gradients: Sequence[Tensor | None]) -> None:
        gradient = gradients[0]
        session = self._session
        if gradient is None:
            return
        clock, site = session.clock, entry.arrival
        detail = clock.detail
        # In a step that is only watched, what is finite leaves no row.
        usual = None if session.capturing else ()
        with quiet():
            site = site if detail is None else site.remarked(detail)
            measure = session.see(site, gradient, None, clock.micro_step, usual)
        if measure is not None:
            self._remember(entry.key, measure)
            if measure.counts is not None or measure.pending:
                self.any_nonfinite = True

    def _remember(self, key: int, measure: Measure) -> None:
        measures = self._arrived.setdefault(key, [])
        measures.append(measure)
        if len(measures) > _MOST_ARRIVED:
            # What is asked of them later is whether all were finite: one of each kind answers for the others.
            waiting = [each for each in measures if each.pending]
            known = {each.finite: each for each in measures if not each.pending}
            self._arrived[key] = [*known.values(), *waiting]


def _release(arrivals: dict[int, _Arrival], root: weakref.ref[Root], _: object) -> None:
    """Let go of the parameters of a root that nobody else holds any more."""
    for key, arrival in list(arrivals.items()):
        if arrival.root is root() and arrivals.pop(key, None) is not None:
            arrival.end()


def _takes_gradients(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.is_leaf and not torch.nn.parameter.is_lazy(parameter)
