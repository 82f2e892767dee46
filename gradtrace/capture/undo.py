"""Runs something on the user's modules such that nothing of it shows afterwards.

Put back are: the generators, the attributes of the modules (also what was put into their plain lists, dicts and
sets), which buffers and parameters they hold, anomaly mode and grad mode. Warnings that the second run would
repeat are not shown, and the user's filters are not touched. What is written into tensors in place is not undone
here: the replay refuses to do it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.capture.rng import Rng

_CONTAINERS = (list, dict, set, deque)
_HUSH: Any = ("ignore", None, Warning, None, 0)


@contextlib.contextmanager
def undone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo afterwards what the block does to ``modules`` and to the state of torch, numpy and random."""
    with contextlib.ExitStack() as stack:
        rng = Rng.now()
        stack.callback(rng.restore)
        stack.callback(torch._C._set_grad_enabled, torch.is_grad_enabled())
        stack.callback(
            torch.autograd.set_detect_anomaly,
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        )
        for module in modules:
            stack.callback(_keep(module))
        stack.enter_context(_hushed())
        yield


def _keep(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives the module back the attributes that it has now."""
    attributes = dict(module.__dict__)
    contents = {name: _copy(value) for name, value in attributes.items() if type(value) in _CONTAINERS}
    held = {name: dict(attributes[name]) for name in ("_parameters", "_buffers", "_modules")}

    def restore() -> None:
        if not _same(module.__dict__, attributes):
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for name, then in (contents | held).items():
            _refill(attributes[name], then)

    return restore


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: Any, then: Any) -> None:
    if isinstance(container, dict):
        if not _same(container, then):
            container.clear()
            container.update(then)
    elif isinstance(container, set):
        if container.symmetric_difference(then):
            container.clear()
            container.update(then)
    elif len(container) != len(then) or any(a is not b for a, b in zip(container, then, strict=True)):
        container.clear()
        container.extend(then)


def _same(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    return len(now) == len(then) and all(key in now and now[key] is value for key, value in then.items())


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Show no warnings for a while.

    Not ``warnings.catch_warnings``: it makes Python forget what it has shown, and a warning that comes once
    would come twice.
    """
    filters: Any = warnings.filters
    filters.insert(0, _HUSH)
    try:
        yield
    finally:
        filters.remove(_HUSH)


@contextlib.contextmanager
def swapped_buffers(modules: Iterable[nn.Module], copies: Mapping[int, Tensor]) -> Iterator[None]:
    """Let the modules hold copies of their buffers; ``copies`` are by the id of the buffer."""
    swapped = []
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in copies:
                    swapped.append((module, name, buffer))
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in swapped:
            module._buffers[name] = buffer
