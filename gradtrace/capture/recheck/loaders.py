"""Makes a script's DataLoader yield the captured batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtrace.capture.recheck.batches import LoaderFacts, next_batch
from gradtrace.capture.recheck.parts import in_short
from gradtrace.capture.recheck.plain import rebuild, structure


class CapturedBatch:
    """Stands in for every batch that is structured like the captured one; ``on_batch`` is told before it does."""

    def __init__(self, batch: Any, loader: LoaderFacts, on_batch: Callable[[], object]) -> None:
        self.count = 0
        """How often it was yielded."""
        self._batch = batch
        self._loader = loader
        self._on_batch = on_batch
        self._others: dict[str, None] = {}

    def install(self, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Stand around the iterators' ``__next__``; errors in here go through ``guarded``."""
        instead = guarded(self._instead_of)

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda iterator: instead(original(iterator))

        next_batch.add(around)

    @property
    def missing(self) -> str:
        """Say that it was never yielded."""
        batches = f"the captured batch is {self._loader.structure} (dataset {self._loader.dataset})"
        if not self._others:
            return f"no DataLoader has yielded before the model was called; {batches}"
        return f"no DataLoader yields batches like the captured one: {batches}; yielded were {in_short(self._others)}"

    def _instead_of(self, batch: Any) -> Any:
        kind = structure(batch)
        if kind != self._loader.structure:
            self._others[kind] = None
            return batch
        self._on_batch()
        self.count += 1
        return rebuild(batch, self._batch)
