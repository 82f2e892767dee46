"""Records ``dying.py`` once for each of its ways, in forked children: so torch is imported once.

Usage: die.py FOLDER WAY...  Each runs in a folder of its own, with its output in the file ``said``. The exit code of
each is printed as a line of JSON; of one that has stopped first null, and it goes on after a line on stdin.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from gradtrace_cli.main import main

from gradtrace.trace.arrow import batch_of_records

# What every child would otherwise import for itself.
for name in ("torch._dynamo", "gradtrace.capture.tracer", "gradtrace_cli.record", "gradtrace_cli.recording"):
    importlib.import_module(name)

SCRIPT = Path(__file__).with_name("dying.py")
MEMORY = 250_000_000


def enter(folder: Path, way: str) -> None:
    """Become what a shell would start: at home, with streams and signals of its own."""
    folder.mkdir()
    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT)
    reader, broken = os.pipe()
    os.close(reader)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(broken if way == "nobody listens" else said, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if way == "out of memory":
        limit_memory()


def limit_memory() -> None:
    """Have the kernel kill this process when it takes too much memory; where no such group can be made, a watcher."""
    group = Path(f"/sys/fs/cgroup/memory/gradtrace-{os.getpid()}")
    limit = group / "memory.limit_in_bytes"
    if not Path("/sys/fs/cgroup/memory").is_dir():
        group = Path(f"/sys/fs/cgroup/gradtrace-{os.getpid()}")
        limit = group / "memory.max"
    try:
        group.mkdir()
        limit.write_text(str(MEMORY))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        Path("killer").write_text("the kernel")
    except OSError:
        Path("killer").write_text("a watcher")
        kill_when_too_large(os.getpid())


def kill_when_too_large(pid: int) -> None:
    """Start a process that kills this one when it has taken too much memory, in the midst of whatever it does."""
    before = resident(pid)
    if os.fork():
        return
    with contextlib.suppress(OSError):
        while resident(pid) < before + MEMORY:
            pass
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def remove_group(pid: int) -> None:
    for place in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        with contextlib.suppress(OSError):
            os.rmdir(f"{place}/gradtrace-{pid}")


def watch(pid: int) -> None:
    """Tell how a child ends, and if it stops before."""
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        print(json.dumps(None), flush=True)
        sys.stdin.readline()
        os.kill(pid, signal.SIGCONT)
        status = os.waitpid(pid, 0)[1]
    remove_group(pid)
    print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


torch.set_num_threads(1)
batch_of_records([])
gc.freeze()  # else each child takes a second to tidy up what it has inherited
for number, way in enumerate(sys.argv[2:]):
    child = os.fork()
    if child == 0:
        enter(Path(sys.argv[1]) / str(number), way)
        sys.exit(main(["record", str(SCRIPT), way]))  # of the interpreter, with all that belongs to it
    watch(child)
