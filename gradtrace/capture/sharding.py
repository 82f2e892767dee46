"""Whether a model's parameters are spread over ranks: such a model cannot be run again by one rank alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def sharding(modules: Iterable[nn.Module]) -> str | None:
    """Return by what any of the modules is sharded, in words; None where each rank has all of it. Asks no rank."""
    modules = list(modules)
    if any(hasattr(parameter, "to_local") for module in modules for parameter in module._parameters.values()):
        return "DTensor"
    # Here parameters are tensors like others, whose memory is not there between their module's own calls: running the
    # forward of one rank alone crashes the process. The wrapper leaves this mark on each module within it.
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in modules):
        return "FullyShardedDataParallel"
    return None
