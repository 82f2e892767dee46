"""Whether all ranks of a launch see an incident alike, so that all of them stop and none waits for the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradtrace.capture.replay.kept import Keeper
from gradtrace.capture.session import quiet


class Agreement:
    """What can be said here of the other ranks, when a backward pass has ended."""

    def __init__(self, keeper: Keeper, is_finite: Callable[[Tensor], bool | None]) -> None:
        self._keeper = keeper
        self._is_finite = is_finite

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks."""
        distributed = torch.distributed
        return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1

    def all_see_bad_gradients(self) -> bool:
        """Whether gradients that all ranks have just reduced together are non-finite.

        Only ``.grad`` after the reduction is the same everywhere. Between two reductions (``no_sync``), or where
        some other way of training keeps the ranks together, this rank cannot know what the others see.
        """
        reducers = {id(r): r for kept in self._keeper.calls if (r := kept.reducer) is not None}
        with quiet():
            return any(self._is_finite(grad) is False for r in reducers.values() for grad in _reduced_by(r))


def _reduced_by(reducer: DistributedDataParallel) -> list[Tensor]:
    """Return the gradients that are the same on all ranks.

    None of them need be where the user reduces in a way of their own, or where ranks may run out of data (join).
    """
    if reducer._comm_hooks or reducer._join_config.enable:
        return []
    return [parameter.grad for parameter in reducer._module_parameters if parameter.grad is not None]
