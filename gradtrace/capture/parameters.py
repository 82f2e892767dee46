"""Parameters, their gradients and buffers, and the optimizers and scalers that change them.

A gradient is taken where it arrives, at its AccumulateGrad node: after backward it may be gone, be an
accumulation that shows an old NaN again, or carry what another process sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradtrace.capture.calls import _inside_backward
from gradtrace.capture.names import Root, TensorEntry
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.statistics import Measure


class _Arrival:
    """The AccumulateGrad node of one parameter, held so that the hook on it lives as long as the root."""

    __slots__ = ("device", "dtype", "handle", "node")

    def __init__(self, parameter: Tensor, hook: Callable[[Sequence[Tensor | None]], None]) -> None:
        self.dtype = parameter.dtype
        self.device = parameter.device
        with torch.enable_grad():
            self.node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.handle = self.node.register_prehook(hook)

    def fits(self, parameter: Tensor) -> bool:
        """Whether torch still uses this node: it makes a new one when type or device change."""
        return self.dtype == parameter.dtype and self.device == parameter.device


class ParameterWatch:
    """Records the state of all known parameters and buffers, and gradients as they arrive."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrivals: dict[int, _Arrival] = {}
        self._arrived: dict[int, list[Measure]] = {}
        self._begun: set[int] = set()
        self._optimizers: dict[int, int] = {}
        self._optimizer_of: dict[int, int] = {}

    # States -------------------------------------------------------------------------------------------------

    def root_begins(self, root: Root) -> None:
        """Watch a root's gradients; the first time, record the state that it starts with."""
        if id(root) in self._begun:
            return
        self._begun.add(id(root))
        with quiet():
            for entry, tensor in self._session.names.tensors():
                if entry.owner.root is root and self._session.capturing:
                    self._record_state("input", entry, tensor)
        self._watch_gradients()

    def record_states(self, optimizer: Optimizer | None) -> None:
        """Record parameters and buffers after a step: those that no other optimizer owns."""
        number = None if optimizer is None else self._number(optimizer)
        with quiet():
            for entry, tensor in self._session.names.tensors():
                owner = self._optimizer_of.get(id(tensor), number)
                if owner == number:
                    self._record_state("optimizer", entry, tensor)
        self._watch_gradients()

    def record_parameters_of(self, optimizer: Optimizer) -> None:
        """Record only what one optimizer has changed."""
        names = self._session.names
        with quiet():
            for parameter in _parameters_of(optimizer):
                entry = names.parameter(parameter)
                if entry is not None and entry.owner.selected:
                    self._record_state("optimizer", entry, parameter)

    def _record_state(self, phase: str, entry: TensorEntry, tensor: Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            return
        # An update through .data leaves no trace in the version: never taken from memory.
        self._session.record(phase, entry.owner, entry.kind, entry.name, tensor, once=False)

    # Gradients ----------------------------------------------------------------------------------------------

    def _watch_gradients(self) -> None:
        known: set[int] = set()
        for entry, tensor in self._session.names.tensors():
            if entry.kind != "param" or not tensor.requires_grad or not tensor.is_leaf:
                continue
            if torch.nn.parameter.is_lazy(tensor):
                continue
            known.add(id(tensor))
            arrival = self._arrivals.get(id(tensor))
            if arrival is None or not arrival.fits(tensor):
                hook = self._session.guarded(functools.partial(self._gradient_arrived, entry))
                self._arrivals[id(tensor)] = _Arrival(tensor, hook)
        for key in [key for key in self._arrivals if key not in known]:
            self._arrivals.pop(key).handle.remove()

    def _gradient_arrived(self, entry: TensorEntry, gradients: Sequence[Tensor | None]) -> None:
        gradient = gradients[0]
        session = self._session
        if gradient is None or not session.capturing:
            return
        with quiet():
            measure = session.record("backward", entry.owner, "grad", entry.name, gradient, detail=session.clock.detail)
        parameter = entry.ref()
        if parameter is not None and measure is not None:
            self._arrived.setdefault(id(parameter), []).append(measure)

    def record_gradients_before(self, optimizer: Optimizer) -> None:
        """Record final gradients whose finiteness differs from what arrived: received, spread or cleaned."""
        parameters = [p for p in _parameters_of(optimizer) if p.grad is not None]
        if not parameters:
            return
        names = self._session.names
        with quiet():
            for parameter in parameters:
                entry = names.parameter(parameter)
                gradient = parameter.grad
                if entry is None or gradient is None or not entry.owner.selected:
                    continue
                arrived = self._arrived.get(id(parameter))
                if gradient.device.type != "cpu":
                    # Whether it differs is known only on the device: the row is kept, it costs no wait.
                    self._record_final(entry, gradient)
                elif _all_finite(gradient) != (not arrived or all(m.finite for m in arrived)):
                    self._record_final(entry, gradient)

    def _record_final(self, entry: TensorEntry, gradient: Tensor) -> None:
        self._session.record("optimizer", entry.owner, "grad", entry.name, gradient, once=False)

    def forget_arrivals(self) -> None:
        """Start a new step."""
        self._arrived.clear()

    # Optimizers ---------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Record learning rates and the final gradients just before ``optimizer`` steps."""
        number = self._number(optimizer)
        for parameter in _parameters_of(optimizer):
            self._optimizer_of[id(parameter)] = number
        if not self._session.capturing:
            return
        session = self._session
        with quiet():
            for index, group in enumerate(optimizer.param_groups):
                rate = group.get("lr")
                if isinstance(rate, (int, float)):
                    rate = torch.tensor(float(rate), dtype=torch.float64, device="cpu")
                if isinstance(rate, Tensor):
                    session.record("optimizer", None, "lr", f"{number}.{index}", rate, once=False)
        self.record_gradients_before(optimizer)

    def _number(self, optimizer: Optimizer) -> int:
        return self._optimizers.setdefault(id(optimizer), len(self._optimizers))

    def stop(self) -> None:
        """Take all hooks off."""
        for arrival in self._arrivals.values():
            arrival.handle.remove()
        self._arrivals.clear()


class OptimizerWatch:
    """torch.optim's global hooks and GradScaler's methods: when a step is taken, and when it is skipped."""

    def __init__(
        self,
        session: Session,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer, bool, bool], None],
        on_scale: Callable[[Tensor], None],
    ) -> None:
        """``after`` gets the optimizer, whether its step was skipped, and whether a backward was running."""
        self._before = session.guarded(before)
        self._after = session.guarded(after)
        self._on_scale = session.guarded(on_scale)
        self._handles: list[Any] = []
        self._scaler_step: Callable[..., Any] | None = None
        self._stepped = False

    def install(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._begins(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._ended(optimizer)),
        ]
        scaler_class = torch.amp.GradScaler
        original = self._scaler_step = scaler_class.step

        @functools.wraps(original)
        def step(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            scale = getattr(scaler, "_scale", None)
            if isinstance(scale, Tensor):
                self._on_scale(scale)
            self._stepped = False
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._stepped:
                self._before(optimizer)
                self._after(optimizer, True, False)
            return result

        scaler_class.step = self._replacement = step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._scaler_step is not None and torch.amp.GradScaler.step is self._replacement:
            torch.amp.GradScaler.step = self._scaler_step  # type: ignore[method-assign]

    def _begins(self, optimizer: Optimizer) -> None:
        self._before(optimizer)

    def _ended(self, optimizer: Optimizer) -> None:
        self._stepped = True
        self._after(optimizer, False, _inside_backward())


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _all_finite(tensor: Tensor) -> bool:
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    if values.numel() == 0 or not (values.is_floating_point() or values.is_complex()):
        return True
    if values.is_complex():
        values = values.abs()
    low, high = torch.aminmax(values)
    return bool(low.isfinite().item() and high.isfinite().item())
