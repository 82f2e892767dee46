"""Parameters and buffers before the first step and after each, and what an optimizer is about to use."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrace.capture.arrivals import Arrivals
from gradtrace.capture.held import TensorEntry
from gradtrace.capture.measures import Measure
from gradtrace.capture.names import ModuleEntry, Root
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.sites import Paths, Site
from gradtrace.capture.watch.tensors import versions

_StateKey = tuple[ModuleEntry, str]


class ParameterWatch:
    """Records the state of all known parameters and buffers, learning rates, and gradients before a step."""

    def __init__(self, session: Session) -> None:
        self.arrivals = Arrivals(session)
        self._session = session
        self._begun: weakref.WeakKeyDictionary[Root, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._not_written: list[Root] = []
        self._rates: weakref.WeakKeyDictionary[Optimizer, tuple[int, Paths]] = weakref.WeakKeyDictionary()
        self._optimizer_count = 0
        self._known_bad: set[_StateKey] = set()
        self._versions: list[int] = []
        self._of_known_models: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    # States -------------------------------------------------------------------------------------------------

    def call_begins(self, root: Root) -> None:
        """At the first call in a step that is captured, record the state that a root starts with."""
        self.arrivals.call_begins()
        if not self._session.capturing:
            return
        begun = self._begun.get(root)
        if begun is not None and begun() is root.ref():  # a root's name may be passed on to another model
            return
        self._begun[root] = root.ref
        self._not_written.append(root)
        with quiet():
            for entry, tensor in self._session.names.tensors():
                # What has been found in a step that was only watched is no state to start with.
                if entry.owner.root is root and not self.is_known_bad(entry):
                    self.record_state("input", entry, tensor)

    def look_at_state(self, owner: ModuleEntry, phase: str) -> None:
        """Record which parameters of a module have become non-finite since they were last looked at.

        Asked for when the module returns something non-finite; the script itself may have written them. Not
        buffers: those the module's own forward may just have written.
        """
        top = owner.ref()
        if top is None:
            return
        below = {id(module) for module in top.modules()}
        for entry, tensor in self._session.names.tensors():
            module = entry.owner.ref()
            is_old = entry.kind == "buffer" or _state_key(entry) in self._known_bad
            if module is None or id(module) not in below or is_old:
                continue
            if self._session.is_finite(tensor) is False:
                self.record_state(phase, entry, tensor)

    def rows_written(self) -> None:
        """Note that the rows in flight are safe."""
        self._not_written.clear()

    def rows_dropped(self) -> None:
        """Note that the rows in flight were none of a captured step: start states are to be taken again."""
        for root in self._not_written:
            self._begun.pop(root, None)
        self._not_written.clear()

    def record_states(self, optimizer: Optimizer | None) -> None:
        """Record parameters and buffers after a step of ``optimizer``, but for what others will update.

        With None everything is recorded.
        """
        foreign = set() if optimizer is None else self._owned_by_others(optimizer)
        with quiet():
            for entry, tensor in self._session.names.tensors():
                if id(tensor) not in foreign:
                    self.record_state("optimizer", entry, tensor)

    def record_parameters_of(self, optimizer: Optimizer) -> None:
        """Record only what one optimizer has changed."""
        names = self._session.names
        with quiet():
            for parameter in parameters_of(optimizer):
                entry = names.parameter(parameter)
                if entry is not None and entry.owner.selected:
                    self.record_state("optimizer", entry, parameter)

    def backward_begins(self) -> None:
        """Note the parameters' versions, from which it is seen that an update has come that nobody has announced."""
        self._versions = self._versions_now()

    def have_changed(self) -> bool:
        """Whether a parameter has been changed since the last backward pass began."""
        return self._versions_now() != self._versions

    def _versions_now(self) -> list[int]:
        return versions(tensor for entry, tensor in self._session.names.tensors() if entry.kind == "param")

    def is_over(self, optimizer: Optimizer) -> bool:
        """Whether all models that ``optimizer`` has updated are gone, so that it will not step again."""
        return optimizer in self._of_known_models and not any(map(self._is_in_use, parameters_of(optimizer)))

    def _is_in_use(self, parameter: Tensor) -> bool:
        return self._session.names.parameter(parameter) is not None

    def _owned_by_others(self, optimizer: Optimizer) -> set[int]:
        others = {id(p) for other in list(self._rates) if other is not optimizer for p in parameters_of(other)}
        return others - {id(p) for p in parameters_of(optimizer)} if others else others

    def record_state(self, phase: str, entry: TensorEntry, tensor: Tensor, detail: str | None = None) -> Measure | None:
        """Add a row, with a remark maybe, for one parameter or buffer. To be called in ``quiet``."""
        if type(tensor) is not nn.Parameter and nn.parameter.is_lazy(tensor):
            return None
        dtype = tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return None
        site = entry.sites[phase]
        measure = self._session.see_anew(site if detail is None else site.remarked(detail), tensor)
        if measure is not None and measure.counts is not None:
            self._known_bad.add(_state_key(entry))
        else:
            self.turned_finite(entry)
        return measure

    def turned_finite(self, entry: TensorEntry) -> None:
        """Note that a parameter or buffer is finite."""
        if self._known_bad:
            self._known_bad.discard(_state_key(entry))

    def is_known_bad(self, entry: TensorEntry) -> bool:
        """Whether a parameter or buffer was non-finite when it was last recorded."""
        return bool(self._known_bad) and _state_key(entry) in self._known_bad

    # Before a step ------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Record learning rates and the final gradients just before ``optimizer`` steps."""
        known = self._rates.get(optimizer)
        if known is None:
            known = self._rates[optimizer] = self._optimizer_count, Paths("optimizer", None, "lr")
            self._optimizer_count += 1
        if optimizer not in self._of_known_models and any(map(self._is_in_use, parameters_of(optimizer))):
            self._of_known_models.add(optimizer)
        with quiet():
            number, sites = known
            for index, group in enumerate(optimizer.param_groups):
                self._record_rate(sites[f"{number}.{index}"], group.get("lr"))
            if self._session.capturing:
                self._record_finals(parameters_of(optimizer))

    def _record_rate(self, site: Site, rate: object) -> None:
        session = self._session
        if isinstance(rate, Tensor):
            session.see_anew(site, rate)
        elif isinstance(rate, (int, float)):
            session.rows.add((site, session.clock.micro_step, None, Measure.of_number(float(rate)), None))

    def _record_finals(self, parameters: list[Tensor]) -> None:
        arrivals = self.arrivals
        unseen = arrivals.unseen(parameters)
        for parameter, gradient in unseen:
            self._record_unseen(parameter, gradient)
        if not arrivals.any_nonfinite:
            recorded = {id(parameter) for parameter, _ in unseen}
            gradients = [g for p in parameters if (g := p.grad) is not None and id(p) not in recorded]
            if self._session.surely_finite(gradients):
                return  # as they were when they arrived
        for parameter in parameters:
            self._record_final(parameter)

    def _record_unseen(self, parameter: Tensor, gradient: Tensor) -> None:
        """Record a gradient that no backward pass has brought here: set by FSDP, by the script, or an older one."""
        entry = self._session.names.parameter(parameter)
        if entry is not None and entry.owner.selected:
            self._session.record("optimizer", entry.owner, "grad", entry.name, gradient, once=False)

    def _record_final(self, parameter: Tensor) -> None:
        """Record a gradient whose finiteness differs from what arrived: received, spread or cleaned."""
        gradient = parameter.grad
        arrived = self.arrivals.of(parameter)
        if gradient is None or not arrived:
            return
        session = self._session
        entry = session.names.parameter(parameter)
        if entry is None or not entry.owner.selected:
            return
        if not session.statistics.waits(gradient):
            finite = session.is_finite(gradient)
            if finite is None or finite == all(measure.finite for measure in arrived):
                return
        # On an accelerator nobody knows yet whether it differs: the row is kept, and left out later.
        session.record("optimizer", entry.owner, "grad", entry.name, gradient, once=False, arrived=arrived)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_key(entry: TensorEntry) -> _StateKey:
    return entry.owner, entry.name
