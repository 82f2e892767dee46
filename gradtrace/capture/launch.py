"""Which process of a launch this is, from the environment that torchrun and other launchers set."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Rank, number of processes, and what the processes of one launch have in common."""

    rank: int = 0
    world_size: int = 1
    attempt: int = 0
    run_id: str | None = None

    @classmethod
    def of_environment(cls) -> Launch:
        """Read RANK, WORLD_SIZE and torchrun's own variables; a single process has no shared run id."""
        world_size = _number("WORLD_SIZE", 1)
        if world_size < 2:
            return cls(world_size=1)
        return cls(
            rank=_number("RANK", 0),
            world_size=world_size,
            attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
            run_id=_shared_id(world_size),
        )


def _shared_id(world_size: int) -> str:
    """Return what the processes of this launch, and of no other, have in common."""
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if _number("LOCAL_WORLD_SIZE", world_size) == world_size:
        # All on this machine, started by one parent: launches on the same address are still told apart.
        parts.append(str(os.getppid()))
    return "-".join(part for part in parts if part) or "launch"


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default
