"""A command in a process of its own, for what a query can do to one: never end, take all memory, crash it.

DuckDB plans a query, and computes its constants, with the interpreter locked. No signal handler and no thread gets a
word in then, so that Ctrl-C and limits have to work from outside: the process below has the signals' default actions,
and the one above says what became of it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .lines import say

_INTERRUPTED = 130
_BAD_QUERY = 3
_GRACE = 5.0
"""Seconds to get ready, and for DuckDB to notice by itself that its time is over."""

_GROWTH = 2**30
"""Bytes that the process may take beside what DuckDB is allowed: the recording's buffers, rows as Python has them."""

_ENDS = {
    "SIGALRM": "the query took longer than it was allowed; a larger --timeout allows it",
    "SIGKILL": "the query was killed, most likely for want of memory: ask for less, or see --memory",
}

_apart = False


def run_apart(command: Callable[[], int]) -> int:
    """Run a command in a process of its own and return its exit code; say so where something else ended it.

    Where there is no fork the command runs here.
    """
    if not hasattr(os, "fork"):
        return command()
    alive, held = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(held)
        _run_below(command, alive)
    os.close(alive)
    try:
        return _wait(child)
    finally:
        os.close(held)


def limit_growth(most: int) -> None:
    """Limit the memory that this process takes from here on, beside what it has; only where it runs apart.

    Linux alone says what it has, and counts what it takes.
    """
    status = Path("/proc/self/status")
    if not _apart or not status.exists():
        return
    import resource

    has = re.search(r"^VmData:\s+(\d+) kB$", status.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    if has is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = int(has[1]) * 1024 + most + _GROWTH
        resource.setrlimit(resource.RLIMIT_DATA, (min(wanted, soft) if soft >= 0 else wanted, hard))


@contextmanager
def hard_timeout(seconds: float | None) -> Iterator[None]:
    """End this process where the block takes longer by more than a moment; only where it runs apart."""
    if not _apart or seconds is None:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run_below(command: Callable[[], int], alive: int) -> None:
    """Be the process below, and end as the command ends."""
    global _apart
    _apart = True
    code = 1
    try:
        _die_with(alive)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        code = command()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing of the process above is closed or removed twice


def _die_with(alive: int) -> None:
    """Let the end of the process above end this one: its end of the pipe closes, and SIGIO is deadly by default."""
    import fcntl

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    with suppress(OSError):  # not every system has signals of pipes
        fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)


def _wait(child: int) -> int:
    try:
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return _INTERRUPTED
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    name = signal.Signals(os.WTERMSIG(status)).name
    if name == "SIGINT":
        return _INTERRUPTED
    crash = f"DuckDB crashed on this query ({name}): ask in another way, or with more memory (--memory)"
    say(f"gradtrace: error: {_ENDS.get(name, crash)}")
    return _BAD_QUERY
