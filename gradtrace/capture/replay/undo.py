"""Runs something on the user's modules such that nothing of it shows afterwards.

Put back are: the generators (also those of the script's own that a module can reach), the attributes of the modules
(also what was put into their plain lists, dicts and sets), which buffers and parameters they hold, anomaly mode and
grad mode. Warnings that the second run would repeat are not shown, and the user's filters are not touched. What is
written into tensors in place is not undone here: the replay refuses to do it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradtrace.capture.replay.generators import kept_states
from gradtrace.capture.replay.kept import Held
from gradtrace.capture.replay.rng import Rng
from gradtrace.capture.subclasses import with_their_own_ways

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_DEEPEST = 6
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
        all_modules = list(modules)
        for restore in kept_states(all_modules):
            stack.callback(restore)
        for module in all_modules:
            stack.callback(_keep(module))
        stack.enter_context(_hushed())
        stack.enter_context(with_their_own_ways())
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            # The user's own hooks on saved tensors are not to be called once more; of several only the last are.
            stack.enter_context(saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor))
        yield


def _keep(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives the module back the attributes that it has now."""
    kept: list[tuple[Any, Any]] = []
    _keep_container(module.__dict__, kept, 0)

    def restore() -> None:
        for container, then in kept:
            _refill(container, then)

    return restore


def _keep_container(container: Any, kept: list[tuple[Any, Any]], depth: int) -> None:
    """Add a plain container and those inside of it, with what they hold now."""
    kind = type(container)
    if kind in _MAPPINGS:
        kept.append((container, dict(container)))
        inside = list(container.values())
    elif kind in _SEQUENCES:
        inside = list(container)
        kept.append((container, inside))
    elif kind is set:
        kept.append((container, set(container)))
        return
    else:
        return
    if depth < _DEEPEST:
        for value in inside:
            _keep_container(value, kept, depth + 1)


def _refill(container: Any, then: Any) -> None:
    if type(container) in _SEQUENCES:
        if len(container) != len(then) or any(a is not b for a, b in zip(container, then, strict=True)):
            container.clear()
            container.extend(then)
    elif isinstance(then, dict):
        if not _same(container, then):
            container.clear()
            container.update(then)
    elif container != then:
        container.clear()
        container.update(then)


def _same(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    """Whether both hold the same things in the same order."""
    return list(now) == list(then) and all(now[key] is value for key, value in then.items())


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
        with contextlib.suppress(ValueError):  # the block has reset them
            filters.remove(_HUSH)


@contextlib.contextmanager
def swapped_buffers(held: Held, copies: Mapping[int, Tensor]) -> Iterator[None]:
    """Let modules hold what they held then, but copies of their buffers; ``copies`` are by the id of the buffer."""
    now = [dict(part) for part, _ in held]
    try:
        for part, then in held:
            _put(part, {name: copies.get(id(tensor), tensor) for name, tensor in then.items()})
        yield
    finally:
        for (part, _), before in zip(held, now, strict=True):
            _put(part, before)


def _put(part: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Fill a dictionary anew; another thread that looks at it finds every name at any time, if none has changed."""
    if list(part) != list(wanted):
        part.clear()
    part.update(wanted)
