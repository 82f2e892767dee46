"""The batch as the DataLoader last yielded it: kept by reference, labels included, for the capsule.

Iteration is not changed. A batch is held until the next one comes or the step ends (``forget``). Loops that fetch
one batch ahead (accelerate) train on the one before: of an iterator that does, two are held.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader
from torch import Tensor

from gradtrace.capture.boundaries import tensors_in_arguments
from gradtrace.capture.patching import Patch
from gradtrace.capture.recheck.plain import structure
from gradtrace.capture.session import Session

next_batch = Patch(dataloader._BaseDataLoaderIter, "__next__")
"""What every DataLoader's iterator, with workers or without, is asked for its next batch by."""


@dataclass(frozen=True)
class LoaderFacts:
    """Which loader yielded a batch: its number in order of first use, its dataset's class, how its batches look."""

    number: int
    dataset: str
    structure: str


@dataclass(frozen=True)
class Yielded:
    """A batch, and the loader that it comes from."""

    batch: Any
    loader: LoaderFacts


@dataclass(frozen=True)
class _Batch:
    """A batch; ``order`` counts those of all loaders."""

    order: int
    batch: Any
    number: int
    dataset: str


class _Held:
    """The last batches of one iterator.

    ``ahead`` tells whether the loop fetches one batch ahead: such a loop asks for one more in its first step than
    in the second. None: not known yet.
    """

    def __init__(self) -> None:
        self.batches: list[_Batch] = []
        self.ahead: bool | None = None
        self._in_step = 0
        self._in_first_step: int | None = None

    def add(self, batch: _Batch) -> None:
        """Hold a batch."""
        self._in_step += 1
        older = self.batches[-1:] if self.ahead is not False else []
        self.batches = [*older, batch]

    def step_ended(self) -> None:
        """Let go of what the next step cannot need."""
        if self._in_step == 0:
            pass  # an evaluation's iterator, or one that is done
        elif self._in_first_step is None:
            self._in_first_step = self._in_step
            self.ahead = None if self._in_step > 1 else False
        elif self.ahead is None:
            self.ahead = self._in_step < self._in_first_step
        self.batches = self.batches[-1:] if self.ahead is not False and self._in_step else []
        self._in_step = 0


class Batches:
    """Watches all DataLoaders of the process while it is installed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._yielded = session.guarded(self._keep)
        self._held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()
        self._last: _Batch | None = None  # ``next(iter(loader))``: its iterator is gone at once
        self._loaders: list[Callable[[], Any]] = []
        self._order = 0
        self._calls: Counter[Hashable] = Counter()

    def install(self) -> None:
        """Stand around the iterators' ``__next__``."""
        next_batch.add(self._around)

    def remove(self) -> None:
        """Let iterators be, and let go of everything."""
        next_batch.remove(self._around)
        self._held.clear()
        self._last = None
        self._loaders.clear()

    def forget(self) -> None:
        """The step has ended: its batch is let go."""
        for held in list(self._held.values()):
            held.step_ended()
        self._last = None
        self._calls.clear()

    def call_begins(self, key: Hashable) -> int:
        """Count an outermost call in grad mode; return its number since a DataLoader yielded, or the step began."""
        number = self._calls[key]
        self._calls[key] += 1
        return number

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Yielded | None:
        """Return the batch that a call's arguments come from, None when no DataLoader has yielded in this step.

        It is the newest of which a tensor is among the arguments, be it on another device, else the newest.
        """
        held = [batch for held in self._held.values() for batch in held.batches]
        if self._last is not None:
            held.append(self._last)
        if not held:
            return None
        newest_first = sorted(held, key=lambda item: -item.order)
        given = [tensor for _, tensor in tensors_in_arguments(args, kwargs)]
        matching = (item for item in newest_first if _share_a_tensor(item.batch, given))
        found = next(matching, newest_first[0])
        return Yielded(found.batch, LoaderFacts(found.number, found.dataset, structure(found.batch)))

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            batch = original(iterator)
            self._yielded(iterator, batch)
            return batch

        return __next__

    def _keep(self, iterator: Any, batch: Any) -> None:
        held = self._held.get(iterator)
        if held is None:
            held = self._held[iterator] = _Held()
        dataset = type(iterator._dataset).__qualname__
        self._last = _Batch(self._order, batch, self._number(iterator), dataset)
        held.add(self._last)
        self._order += 1
        self._calls.clear()

    def _number(self, iterator: Any) -> int:
        """Return the loader's number. Iterators know their loader only by its sampler, which is the loader's own."""
        sampler = iterator._index_sampler
        for number, reference in enumerate(self._loaders):
            if reference() is sampler:
                return number
        self._loaders.append(_reference(sampler))
        return len(self._loaders) - 1


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # a plain list of lists may be a batch sampler
        return lambda: value


def _share_a_tensor(batch: Any, given: Iterable[Tensor]) -> bool:
    inside = list(_tensors(batch))
    return any(same_elements(tensor, other) for tensor in given for other in inside)


def _tensors(batch: Any) -> Iterator[Tensor]:
    for _, tensor in tensors_in_arguments((batch,), {}):
        yield tensor


def same_elements(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same elements; NaN is equal to itself."""
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    if left.device == right.device and left.data_ptr() == right.data_ptr():
        return True
    with torch.no_grad():
        there = right.to(left.device)
        return bool(((left == there) | ((left != left) & (there != there))).all().item())
