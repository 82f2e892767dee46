"""Which models of a script are those of a capsule, and how they get their captured weights and buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradtrace.capture.recheck.capsule import Capsule, ModelState
from gradtrace.capture.recheck.contents import tensors_of
from gradtrace.capture.recheck.parts import in_short
from gradtrace.errors import CapsuleError


class Models:
    """The roots of a capsule, looked for among the models that a script calls."""

    def __init__(self, capsule: Capsule) -> None:
        self._states = capsule.models
        self.seen: dict[str, None] = {}
        """The models that were called in grad mode, in words."""

    def state_of(self, top: nn.Module, label: str) -> ModelState | None:
        """Return the captured state of a root: that of its label, else the first of its class's name.

        A label is the name of a variable, and a mend may change it, or move the class to another file.
        """
        name = type(top).__name__
        self.seen.setdefault(f"{label} ({name})")
        by_label = next((state for state in self._states if state.label == label), None)
        return by_label or next((s for s in self._states if s.kind.rpartition(".")[2] == name), None)


def load_state(top: nn.Module, state: ModelState) -> None:
    """Give a root its captured weights and buffers, in place and where they differ.

    Raises:
        CapsuleError: they do not fit; the message names the keys and shapes.
    """
    weights, buffers, hidden = tensors_of(top)
    problems = [*_misfits(weights, state.weights), *_misfits(buffers, state.buffers)]
    if problems:
        raise CapsuleError(f"{type(top).__qualname__} no longer fits the weights in the capsule: {'; '.join(problems)}")
    known = {**state.weights, **state.buffers, **state.hidden}
    with torch.no_grad():
        for name, tensor in {**weights, **buffers, **hidden}.items():
            value = known.get(name)
            if value is not None and (nn.parameter.is_lazy(tensor) or tensor.shape == value.shape):
                _put(tensor, value)


def _misfits(now: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> list[str]:
    new, gone = [k for k in now if k not in then], [k for k in then if k not in now]
    changed = [
        f"{name} {list(then[name].shape)} captured, {list(tensor.shape)} now"
        for name, tensor in now.items()
        if name in then and not nn.parameter.is_lazy(tensor) and tensor.shape != then[name].shape
    ]
    words = (("new", new), ("gone", gone), ("other shape", changed))
    return [f"{what}: {in_short(names)}" for what, names in words if names]


def _put(tensor: Tensor, value: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        tensor.materialize(value.shape)
    there = value.to(tensor.device, tensor.dtype)
    # Only where it differs: what some graph has already used keeps its version.
    if not torch.equal(tensor, there):
        tensor.copy_(there)
