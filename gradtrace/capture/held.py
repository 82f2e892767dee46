"""Parameters and buffers by the places that hold them: an owner and a name.

By nothing else: ``torch.utils.swap_tensors``, and with it ``Module.to``, refuses tensors that have weak references.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradtrace.capture.sites import Site, SitesOfState

if TYPE_CHECKING:
    from gradtrace.capture.names import ModuleEntry


class TensorEntry:
    """A parameter or buffer with its owner's entry and its own name in it."""

    __slots__ = ("arrival", "key", "kind", "name", "owner", "sites")

    def __init__(self, tensor: Tensor, owner: ModuleEntry, name: str, kind: str) -> None:
        self.key = id(tensor)
        self.owner = owner
        self.name = name
        self.kind = kind
        self.sites = SitesOfState(owner, kind, name)
        self.arrival = Site("backward", owner, "grad", name)
        """Where its gradients arrive."""

    def ref(self) -> Tensor | None:
        """Return the tensor if its owner still has it."""
        return next((tensor for _, tensor in still_held([self])), None)


def still_held(entries: Sequence[TensorEntry]) -> list[tuple[TensorEntry, Tensor]]:
    """Return the entries whose tensors are where they were found, with the tensors."""
    pairs: list[tuple[TensorEntry, Tensor]] = []
    owner = kind = None
    held: Mapping[str, Tensor | None] = {}
    for entry in entries:
        if entry.owner is not owner or entry.kind is not kind:  # mostly there are several of one owner
            owner, kind = entry.owner, entry.kind
            held = _tensors_in(owner.ref(), kind)
        tensor = held.get(entry.name)
        if tensor is not None and id(tensor) == entry.key:
            pairs.append((entry, tensor))
    return pairs


def _tensors_in(module: nn.Module | None, kind: str) -> Mapping[str, Tensor | None]:
    if module is None:
        return {}
    part = module._parameters if kind == "param" else module._buffers
    return part if isinstance(part, dict) else dict(part.items())  # of a scripted module it is none


class Listed:
    """The tensors that were found below the roots, good as long as no module holds another thing than then.

    Keeps nothing alive.
    """

    def __init__(self, modules: list[nn.Module], pairs: list[tuple[TensorEntry, Tensor]]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._entries = [entry for entry, _ in pairs]
        places = {id(tensor): place for place, tensor in enumerate(_tensors_of(modules))}
        self._places = [places[entry.key] for entry in self._entries]
        self._contents = _contents(modules)

    def pairs(self) -> list[tuple[TensorEntry, Tensor]] | None:
        """Return the tensors with their entries, None where something is another one."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if len(modules) != len(self._modules) or _contents(modules) != self._contents:
            return None
        held = _tensors_of(modules)
        return [(entry, held[place]) for entry, place in zip(self._entries, self._places, strict=True)]


_parts = operator.attrgetter("_parameters", "_modules", "_buffers")
_tensor_parts = operator.attrgetter("_parameters", "_buffers")
_keys = operator.methodcaller("keys")
_values = operator.methodcaller("values")


def _tensors_of(modules: Iterable[nn.Module]) -> list[Any]:
    chained = itertools.chain.from_iterable
    return list(chained(map(_values, chained(map(_tensor_parts, modules)))))


def _contents(modules: list[nn.Module]) -> list[Any]:
    """Return what tells whether modules hold what they held before: the names and the identities of it all.

    Asked for twice a step, so all of it at once.
    """
    chained = itertools.chain.from_iterable
    parts = list(chained(map(_parts, modules)))
    contents: list[Any] = [*map(len, parts), *chained(map(_keys, parts)), *map(id, chained(map(_values, parts)))]
    # Of buffers only floating ones are listed: one that is not could be followed by one that is, at its place.
    contents += [None if buffer is None else buffer.dtype for buffer in chained(map(_values, parts[2::3]))]
    return contents
