"""Which process records a run, and whether it still lives: the difference between recording and killed."""

from __future__ import annotations

import os
import socket
from typing import Any


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other one; JSON values only."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid)}


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether the process that ``this_process`` described still runs; None when it is on another host."""
    if process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
    return process.get("started") == _start_time(pid)


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, where the system has /proc; None for a zombie.

    A process number is used again after a while; together with the start it is not.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
