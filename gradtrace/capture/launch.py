"""Which process of a launch this is: from the environment that torchrun and other launchers set, or from
torch.distributed where that is at work, in processes that the script or its framework has started itself.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from torch import distributed

_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
"""Rank, number of processes and how many of them are on this machine: of torchrun, and of what stands behind mpirun."""


@dataclass(frozen=True)
class Launch:
    """Rank, number of processes, and what the processes of one launch have in common."""

    rank: int = 0
    world_size: int = 1
    attempt: int = 0
    run_id: str | None = None

    @classmethod
    def of_environment(cls) -> Launch:
        """Read RANK, WORLD_SIZE and the like of other launchers; a single process has no shared run id.

        Once there is a process group, it is what says rank and size.
        """
        together = distributed.is_available() and distributed.is_initialized()
        found = next((names for names in _VARIABLES if os.environ.get(names[1])), _VARIABLES[0])
        world_size = distributed.get_world_size() if together else _number(found[1], 1)
        if world_size < 2:
            return cls(world_size=1)
        all_here = _number(found[2], world_size) == world_size
        return cls(
            rank=distributed.get_rank() if together else _number(found[0], 0),
            world_size=world_size,
            attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
            run_id=(_left_in_store() if together else None) or _shared_id(all_here),
        )

    @property
    def others_unseen(self) -> str | None:
        """A remark where by now there are more processes than was known when the recording began."""
        together = distributed.is_available() and distributed.is_initialized()
        if not together or self.world_size > 1 or distributed.get_world_size() == 1:
            return None
        return (
            f"rank {distributed.get_rank()} alone of {distributed.get_world_size()} is in this recording: the script "
            "started the others itself; a launcher such as torchrun lets each be recorded"
        )


def _left_in_store() -> str | None:
    """Return what the first process to ask has left in the store of the process group: nobody waits for another.

    None where the launcher has a name for the launch, which restarts share, or where there is no such store.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        return store.compare_set("gradtrace", "", uuid.uuid4().hex).decode()
    except Exception:  # an interface of torch's own, and a store of anybody's
        return None


def _shared_id(all_here: bool) -> str:
    """Return what the processes of this launch, and of no other, have in common."""
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if all_here:
        # All on this machine, started by one parent: launches on the same address are still told apart.
        parts.append(str(os.getppid()))
    return "-".join(part for part in parts if part) or "launch"


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default
