"""Trains a small model for five steps and then dies, or goes on, in the way that its argument names.

Each step is told to the file ``told`` once its optimizer has stepped: what has to be in the recording.
"""

import atexit
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import threading
import time

import torch
from torch import nn

_told = os.open("told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps: range) -> None:
    for step in steps:
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(_told, f"{step}\n".encode())
        os.fsync(_told)


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)


def die_in_forward(number: signal.Signals) -> None:
    model.register_forward_hook(lambda *_: os.kill(os.getpid(), number))
    train(range(5, 7))


def hang_up() -> None:
    """The terminal goes away: nothing can be said any more."""
    for stream in (0, 1, 2):
        os.close(stream)
    send("SIGHUP")


def terminate_twice() -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=twice).start()
    train(range(5, 100_000))


class Poisoned(torch.utils.data.Dataset):
    """Ends its worker in the way that it is told to."""

    def __init__(self, end) -> None:
        self.end = end

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            self.end()
        return torch.zeros(4)


def fail() -> None:
    raise ValueError("a bad sample")


def load(end) -> None:
    for _ in torch.utils.data.DataLoader(Poisoned(end), num_workers=1, multiprocessing_context="fork"):
        train(range(5, 6))


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + 400_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def allocate(make) -> None:
    kept = []
    for step in range(5, 100_000):
        kept.append(make())
        train(range(step, step + 1))


def become(*words: str) -> None:
    os.execv(sys.executable, [sys.executable, *words])


def fork(end) -> None:
    child = os.fork()
    if child == 0:
        for _ in range(2):  # told by nobody
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        end()
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    train(range(5, 7))


def train_when_main_has_ended() -> None:
    threading.main_thread().join()
    train(range(5, 9))


def train_for_ever() -> None:
    while True:
        model(torch.randn(3, 4)).square().mean().backward()


def in_the_midst_of(name: str, number: signal.Signals) -> None:
    """Have a signal come while the recording is finished: before the merge, in it, or once it is done."""
    from gradtrace.capture import steps
    from gradtrace.trace import merging, writer

    owner = {"end": steps.Steps, "_reach_the_disk": merging, "remove_parts": writer}[name]
    function = getattr(owner, name)

    def interrupted(*arguments):
        os.kill(os.getpid(), number)
        return function(*arguments)

    setattr(owner, name, interrupted)


WAYS = {
    "kill": lambda: send("SIGKILL"),
    "kill in forward": lambda: die_in_forward(signal.SIGKILL),
    "terminate": lambda: send("SIGTERM"),
    "terminate in forward": lambda: die_in_forward(signal.SIGTERM),
    "terminate twice": terminate_twice,
    "interrupt": lambda: send("SIGINT"),
    "hang up": hang_up,
    "leave at once": lambda: os._exit(7),
    "raise": fail,
    "exit with a text": lambda: sys.exit("bye"),
    "exit with a large number": lambda: sys.exit(256 + 44),
    "abort": os.abort,
    "segmentation fault": lambda: (faulthandler.enable(), ctypes.string_at(0)),
    "worker raises": lambda: load(fail),
    "worker is killed": lambda: load(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "address space": lambda: (limit_memory(), allocate(lambda: torch.ones(5_000_000))),
    "memory error": lambda: (limit_memory(), allocate(lambda: bytearray(20_000_000))),
    "out of memory": lambda: allocate(lambda: torch.ones(5_000_000)),
    "become another program": lambda: become("-c", "raise SystemExit(9)"),
    "record anew": lambda: become("-m", "gradtrace", "record", sys.argv[0], "raise"),
    "child is killed": lambda: fork(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "child raises": lambda: fork(fail),
    "stop and go on": lambda: (os.kill(os.getpid(), signal.SIGSTOP), train(range(5, 7))),
    "thread outlives main": lambda: threading.Thread(target=train_when_main_has_ended).start(),
    "daemon trains for ever": lambda: threading.Thread(target=train_for_ever, daemon=True).start(),
    "train at exit": lambda: atexit.register(train, range(5, 8)),
    "nobody listens": lambda: None,
    "interrupt before the merge": lambda: in_the_midst_of("end", signal.SIGINT),
    "interrupt in the merge": lambda: in_the_midst_of("_reach_the_disk", signal.SIGINT),
    "terminate in the merge": lambda: in_the_midst_of("_reach_the_disk", signal.SIGTERM),
    "kill in the merge": lambda: in_the_midst_of("_reach_the_disk", signal.SIGKILL),
    "kill after the merge": lambda: in_the_midst_of("remove_parts", signal.SIGKILL),
}

if __name__ == "__main__":
    train(range(5))
    WAYS[sys.argv[1]]()
