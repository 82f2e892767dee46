"""Which process records a run, and whether it still does: the difference between recording and killed."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrace.trace.lock import is_held

_LARGEST = 2**31


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other one; JSON values only."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "space": _pid_space(), "started": _start_time(pid)}


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether the process that ``this_process`` described still runs; None when it is where its number means nothing.

    That is another host, or another container of one.
    """
    if process.get("host") != socket.gethostname() or process.get("space") not in (None, _pid_space()):
        return None
    pid = process.get("pid")
    if not isinstance(pid, int) or not 0 < pid < _LARGEST:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, of which the system may tell nothing more
        if _start_time(pid) is None:
            return None
    return process.get("started") == _start_time(pid)


def is_writing(parts: Path, facts: Mapping[str, Any]) -> bool | None:
    """Whether the process named in ``facts`` (run.json) still writes in ``parts``; None when that cannot be known.

    A process that has become another program (exec) has the same number and start: only its lock is gone.
    """
    process = facts.get("process")
    if not isinstance(process, dict):
        return False
    alive = is_alive(process)
    if alive is False:
        return False
    held = is_held(parts) if process.get("locked") else None
    if held is not None and alive:
        return held
    return held or (alive if facts.get("end") == "running" else False)


def _pid_space() -> str | None:
    """Return what numbers of processes count in, where the system says so: each container may have a 1."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


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
