"""torch.optim's global hooks and GradScaler's methods: when a step is taken, and when it is skipped."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.optim.optimizer as hooks
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradtrace.capture.calls import _inside_backward
from gradtrace.capture.patching import Patch
from gradtrace.capture.session import Session

_scaler_step = Patch(torch.amp.GradScaler, "step")
_scaler_scale = Patch(torch.amp.GradScaler, "scale")
CLEARED = "optimizer's hooks cleared by the script (a step may have been counted to the next one)"
_HOOKED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


class OptimizerWatch:
    """Reports the steps of all optimizers of the process while it is installed."""

    def __init__(
        self,
        session: Session,
        before: Callable[[Optimizer, bool], None],
        after: Callable[[Optimizer, bool, bool], None],
        on_scale: Callable[[int, Tensor], None],
        on_scaled: Callable[[], None],
    ) -> None:
        """``before`` gets the optimizer and whether its step was skipped, ``after`` also whether a backward ran.

        The latter is not called for a step that is part of another optimizer's. ``on_scale`` gets the number of a
        scaler and its scale. ``on_scaled`` is called when a loss is scaled.
        """
        self._before = session.guarded(before)
        self._after = session.guarded(after)
        self._on_scale = session.guarded(on_scale)
        self._on_scaled = session.guarded(on_scaled)
        self._session = session
        self._handles: list[Any] = []
        self._scalers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._scaler_count = 0
        self._thread = threading.local()

    def install(self) -> None:
        """Register the hooks."""
        self._register()
        _scaler_step.add(self._around_scaler)
        _scaler_scale.add(self._around_scaling)

    def _register(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._begins(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._ended(optimizer)),
        ]

    def look_after(self) -> None:
        """Register the hooks anew where the script has cleared all of torch's, and say that a step may be missing."""
        if not self._handles or self._are_in_place():
            return
        self._session.unmeasured[CLEARED] += 1
        for handle in self._handles:
            handle.remove()
        self._register()

    def _are_in_place(self) -> bool:
        before, after = self._handles
        return before.id in hooks._global_optimizer_pre_hooks and after.id in hooks._global_optimizer_post_hooks

    def remove(self) -> None:
        """Take the hooks off, unless one of them is asking for it: torch is going through them then."""
        if not getattr(self._thread, "inside", False):
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        _scaler_step.remove(self._around_scaler)
        _scaler_scale.remove(self._around_scaling)

    def _around_scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                self._on_scaled()
            return original(scaler, *args, **kwargs)

        return scale

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            scale = getattr(scaler, "_scale", None)
            if isinstance(scale, Tensor):
                self._on_scale(self._number_of(scaler), scale)
            self._thread.stepped = False
            result = original(scaler, optimizer, *args, **kwargs)
            # What is no optimizer of torch's has no hooks: whether it was skipped cannot be said.
            if not self._thread.stepped and isinstance(optimizer, Optimizer):
                self._before(optimizer, True)
                self._after(optimizer, True, False)
            return result

        return step

    def _number_of(self, scaler: torch.amp.GradScaler) -> int:
        """Return the scaler's number, which is no other's even when that one is gone."""
        if scaler not in self._scalers:
            self._scalers[scaler] = self._scaler_count
            self._scaler_count += 1
        return self._scalers[scaler]

    def _begins(self, optimizer: Optimizer) -> None:
        with self._inside_hook():
            self._before(optimizer, False)

    def _ended(self, optimizer: Optimizer) -> None:
        self._thread.stepped = True
        if not _inside_another_step():
            with self._inside_hook():
                self._after(optimizer, False, _inside_backward())

    @contextlib.contextmanager
    def _inside_hook(self) -> Iterator[None]:
        self._thread.inside = True
        try:
            yield
        finally:
            self._thread.inside = False


def _inside_another_step() -> bool:
    """Whether the step that has ended was taken by another optimizer's: ZeroRedundancyOptimizer, Lookahead."""
    steps = 0
    frame = sys._getframe(1)
    while frame is not None:
        steps += frame.f_code is _HOOKED_STEP
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1
