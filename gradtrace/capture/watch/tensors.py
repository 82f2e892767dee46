"""The parameters and buffers of the known roots, for those who ask in every step.

``Names.tensors`` compares what every module holds, which costs as much as reading the gradients of a small model.
Here the list is taken anew when a module has been named or a tensor is gone, and now and then anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gradtrace.capture.held import TensorEntry, still_held
from gradtrace.capture.names import Names
from gradtrace.trace.sent import let_pass

_USES = 16
"""So many times a list is used before it is compared with the modules again."""

Pairs = Sequence[tuple[TensorEntry, Tensor]]


class WatchedTensors:
    """Lists what is to be looked at: everything floating or complex. Holds no tensor between two questions."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._parameters: list[TensorEntry] = []
        self._buffers: list[TensorEntry] = []
        self._known = -1
        self._uses = 0

    def parameters(self) -> Pairs:
        """Return the parameters with their entries."""
        self._uses += 1
        if self._known != self._names.count or self._uses > _USES:
            self.refresh()
        pairs = still_held(self._parameters)
        if len(pairs) < len(self._parameters):
            self.refresh()
            pairs = still_held(self._parameters)
        return pairs

    def buffers(self) -> Pairs:
        """Return the buffers with their entries, as of the last look at the modules."""
        return still_held(self._buffers)

    def refresh(self) -> None:
        """Look at the modules."""
        measured = [entry for entry, tensor in self._names.tensors() if _is_measured(tensor)]
        self._parameters = [entry for entry in measured if entry.kind == "param"]
        self._buffers = [entry for entry in measured if entry.kind == "buffer"]
        self._known = self._names.count
        self._uses = 0


def by_device(pairs: Pairs) -> dict[torch.device, list[tuple[TensorEntry, Tensor]]]:
    """Return tensors and their entries apart by device, in order."""
    groups: dict[torch.device, list[tuple[TensorEntry, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault(pair[1].device, []).append(pair)
    return groups


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the versions of tensors; an inference tensor has none, and none changes."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError as error:
        let_pass(error)
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _is_measured(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and (tensor.is_floating_point() or tensor.is_complex())
