"""What goes into a capsule: a kept root call, the models of the run and the generators, as plain data.

How it gets to disk is the business of ``capsule.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradtrace.capture.names import Root, walk
from gradtrace.capture.recheck.batches import Yielded
from gradtrace.capture.recheck.capsule import Capsule, ModelState
from gradtrace.capture.recheck.plain import tensors_in_plain, to_plain
from gradtrace.capture.replay.rng import Rng
from gradtrace.capture.sharding import sharding
from gradtrace.errors import CapsuleError


class _HasRoot(Protocol):
    @property
    def root(self) -> Root: ...


class KeptCall(Protocol):
    """What a capsule takes from a kept root call; ``kept.Kept`` is one."""

    number_in_step: tuple[int, int]

    @property
    def entry(self) -> _HasRoot: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def rng(self) -> Rng: ...
    @property
    def autocast(self) -> Sequence[tuple[str, bool, torch.dtype]]: ...
    @property
    def buffers(self) -> Mapping[int, Tensor]: ...
    @property
    def gradients(self) -> Mapping[str, Tensor]: ...


def capsule_of(
    kept: KeptCall,
    *,
    step: int,
    micro_step: int,
    boundary: str,
    phase: str,
    number: int,
    yielded: Yielded | None = None,
    roots: Iterable[Root] = (),
    loss: float | None = None,
    loss_seen: bool = False,
) -> Capsule:
    """Make a capsule of a root call of the failing pass. No tensor is copied: save it before the optimizer steps.

    ``number`` is what ``Batches.call_begins`` returned for the call, ``yielded`` what ``Batches.of_call`` returns
    for its arguments. ``roots`` are the run's; those of which nothing is left are passed over.

    Raises:
        CapsuleError: the model is sharded over ranks, or an argument, the batch or a weight is of a type that cannot be
            loaded with ``weights_only``.
    """
    by = sharding(kept.module.modules())
    if by is not None:
        raise CapsuleError(f"the model's parameters are sharded ({by})")
    failing = kept.entry.root
    others = [root for root in roots if root is not failing]
    states = [_state_of(root, kept.buffers) for root in (failing, *others)]
    args = tuple(to_plain(value, f"argument {index}") for index, value in enumerate(kept.args))
    kwargs = {name: to_plain(value, f"argument {name}") for name, value in kept.kwargs.items()}
    gradients = {path: to_plain(value, f"gradient of output {path}") for path, value in kept.gradients.items()}
    top = failing.ref()
    return Capsule(
        step=step,
        micro_step=micro_step,
        boundary=boundary,
        phase=phase,
        module=name_below(top, kept.module) if top is not None else "",
        number=number,
        models=[state for state in states if state.weights or state.buffers or state.hidden or state is states[0]],
        args=args,
        kwargs=kwargs,
        devices=_devices({**{str(index): value for index, value in enumerate(args)}, **kwargs}),
        batch=None if yielded is None else to_plain(yielded.batch, "batch"),
        loader=None if yielded is None else yielded.loader,
        rng=_plain_rng(kept.rng),
        autocast=[(device, on, str(dtype)) for device, on, dtype in kept.autocast],
        gradients=gradients,
        loss=loss,
        loss_seen=loss_seen,
    )


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put generators back as a capsule has them, as far as they are here: devices and numpy may not be.

    Raises:
        CapsuleError: that is no state of a generator.
    """
    now = Rng.now()
    try:
        devices = tuple(state["devices"])
        there = torch.cuda.is_available() and torch.cuda.device_count() == len(devices)
        numpy = state["numpy"] if now.numpy is not None else None
        Rng(state["cpu"], devices if there else (), numpy, state["python"]).restore()
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        now.restore()
        raise CapsuleError(f"the capsule's random numbers cannot be put back: {error}; it is damaged") from None


def name_below(top: nn.Module, module: nn.Module) -> str:
    """Return the name of a module below a root, '' for the root itself and for its wrappers."""
    return next((name for name, other in walk(top) if other is module), "")


def tensors_of(top: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return parameters, buffers and non-persistent buffers below a root by their names, wrappers left out.

    What is held under several names is there under each of them.
    """
    weights: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    hidden: dict[str, Tensor] = {}
    for prefix, module in _walk_all(top):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weights[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                place = hidden if name in module._non_persistent_buffers_set else buffers
                place[prefix + name] = buffer
    return weights, buffers, hidden


def _walk_all(top: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for name, module in walk(top):
        yield f"{name}." if name else "", module


def _state_of(root: Root, copies: Mapping[int, Tensor]) -> ModelState:
    top = root.ref()
    if top is None:
        return ModelState(root.label, root.type_name, {}, {}, {}, {})

    def plain(tensors: dict[str, Tensor], what: str) -> dict[str, Tensor]:
        before = {name: copies.get(id(tensor), tensor) for name, tensor in tensors.items()}
        return {name: to_plain(tensor, f"{what} {name} of {root.label}") for name, tensor in before.items()}

    weights, buffers, hidden = tensors_of(top)
    return ModelState(
        root.label,
        root.type_name,
        plain(weights, "parameter"),
        plain(buffers, "buffer"),
        plain(hidden, "buffer"),
        {name: module.training for name, module in walk(top)},
    )


def _devices(values: dict[str, Any]) -> dict[str, str]:
    return {path: str(tensor.device) for path, tensor in tensors_in_plain(values) if tensor.device.type != "cpu"}


def _plain_rng(rng: Rng) -> dict[str, Any]:
    numpy = None
    if isinstance(rng.numpy, tuple):  # another bit generator than the default one has a dict
        name, keys, *rest = rng.numpy
        numpy = (
            str(name),
            [int(key) for key in keys],
            *(value.item() if hasattr(value, "item") else value for value in rest),
        )
    return {"cpu": rng.cpu, "devices": list(rng.devices), "numpy": numpy, "python": rng.python}
