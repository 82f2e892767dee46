"""A training whose disk fails: FAULT names how, AT the step. The last line printed is what the training came to."""

import errno
import hashlib
import io
import os
import resource
import shutil
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

DIRECTORY = Path(os.environ.get("DIRECTORY", "."))
PARTS = DIRECTORY / "run.parquet.parts"
held, replaced = [], []


def fill() -> None:
    """Leave no byte on the disk, if there is one that is small enough."""
    if not os.path.ismount(DIRECTORY):
        refuse(errno.ENOSPC)
        return
    with open(DIRECTORY / "filler", "wb", buffering=0) as filler:
        for size in (4096, 1):
            try:
                while filler.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def make_room() -> None:
    """The disk is as it was."""
    if os.path.ismount(DIRECTORY):
        (DIRECTORY / "filler").unlink()
    for module, name, function in replaced:
        setattr(module, name, function)


def remove() -> None:
    while PARTS.exists():  # the recording may put something there meanwhile
        shutil.rmtree(PARTS, ignore_errors=True)


def remove_parent() -> None:
    shutil.rmtree(DIRECTORY)


def replace() -> None:
    PARTS.rename(DIRECTORY / "elsewhere.parquet.parts")
    PARTS.mkdir()
    (PARTS / "mine.txt").write_text("not gradtrace's")


def limit_size() -> None:
    size = max(path.stat().st_size for path in PARTS.iterdir()) + 5000
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def open_too_many() -> None:
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE


def take_permission() -> None:
    """Nothing can be created or removed in the directory any more; root, who still could, becomes somebody else."""
    PARTS.chmod(0o555)
    if os.geteuid() == 0:
        for path in (PARTS, *PARTS.iterdir()):
            os.chown(path, 65534, 65534)
        os.setresuid(65534, 65534, 0)


def refuse(number: int) -> None:
    """Refuse from now on whatever changes something below the directory, as the kernel does when a disk breaks."""

    def refusing(function, is_refused):
        def call(*arguments, **more):
            if is_refused(*arguments):
                raise OSError(number, os.strerror(number), str(arguments[0]))
            return function(*arguments, **more)

        return call

    def is_below(path, *_) -> bool:
        return not isinstance(path, int) and os.path.abspath(path).startswith(str(DIRECTORY.resolve()))

    def is_there(fd, *_) -> bool:
        return is_below(os.readlink(f"/proc/self/fd/{fd}"))

    def makes(path, flags, *_) -> bool:
        return is_below(path) and bool(flags & os.O_CREAT)

    def writes(path, mode="r", *_) -> bool:
        return is_below(path) and mode != "r"

    for name, is_refused in (
        ("write", is_there),
        ("pwrite", is_there),
        ("ftruncate", is_there),
        ("open", makes),
        ("replace", is_below),
        ("rename", is_below),
        ("unlink", is_below),
    ):
        replaced.append((os, name, getattr(os, name)))
        setattr(os, name, refusing(getattr(os, name), is_refused))
    replaced.append((io, "open", io.open))
    io.open = refusing(io.open, writes)


FAULTS = {
    "full": fill,
    "removed": remove,
    "parent removed": remove_parent,
    "replaced": replace,
    "size limit": limit_size,
    "too many files": open_too_many,
    "permission": take_permission,
    "broken": lambda: refuse(errno.EIO),
    "read-only": lambda: refuse(errno.EROFS),
    "quota": lambda: refuse(errno.EDQUOT),
    "none": lambda: None,
}

if "QUIET" in os.environ:
    warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(os.environ.get("STEPS", "60"))):
    if str(step) == os.environ.get("AT", "20"):
        FAULTS[os.environ.get("FAULT", "none")]()
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
if os.environ.get("AT") == "end":
    FAULTS[os.environ["FAULT"]]()
if os.environ.get("THEN") == "room":
    make_room()
came_to = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
print(came_to.hexdigest(), loss.item().hex())
sys.exit(5)
