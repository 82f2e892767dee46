"""Whether all ranks of a launch see an incident alike, so that all of them stop and none waits for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradtrace.capture.kept import Kept
from gradtrace.capture.session import quiet


def all_ranks_see(kept: Sequence[Kept], is_finite: Callable[[Tensor], bool | None]) -> bool:
    """Whether gradients that all ranks have reduced together are non-finite; with one rank there is nobody to ask.

    Only ``.grad`` after the reduction is the same everywhere. Between two reductions (``no_sync``), or where some
    other way of training keeps the ranks together, this rank cannot know what the others see.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return True
    reducers = [call.reducer for call in kept]
    if not reducers or not all(r is not None and r.require_backward_grad_sync for r in reducers):
        return False
    with quiet():
        grads = [p.grad for r in reducers if r is not None for p in r.module.parameters() if p.grad is not None]
        return any(is_finite(grad) is False for grad in grads)
