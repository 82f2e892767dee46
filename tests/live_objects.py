"""What there is of gradtrace's and of torch's in this process, by type: what does not grow is not leaked."""

from __future__ import annotations

import functools
import gc
import types
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def live() -> Counter[str]:
    """Count what there is by type: tensors, nodes of graphs, and objects, functions and hooks of gradtrace's."""
    return of_interest(gc.get_objects())


def of_interest(things: Iterable[Any]) -> Counter[str]:
    """Count by type those of these things that are tensors, nodes of graphs or gradtrace's."""
    kinds: Counter[str] = Counter()
    for thing in things:
        kind = type(thing)
        owner = thing.func if kind is functools.partial else thing if kind is types.FunctionType else kind
        if "Backward" in kind.__name__ or str(getattr(owner, "__module__", "")).startswith("gradtrace"):
            kinds[kind.__name__] += 1
        elif issubclass(kind, Tensor):
            kinds["Tensor"] += 1
    return kinds
