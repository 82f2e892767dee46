"""The capsule: a failing step on disk, in one file that ``torch.load(weights_only=True)`` reads.

What goes into it is the business of ``contents.py``, what is done with it that of ``ask.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickletools
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradtrace
from gradtrace.capture.recheck.batches import LoaderFacts
from gradtrace.capture.recheck.storages import compact, stored_bytes
from gradtrace.errors import CapsuleError, RunNotFoundError

FORMAT = 1
# 1  first version
_MARK = "gradtrace capsule"


@dataclass
class ModelState:
    """A root as it was before the step. Names are those of state_dict; ``hidden`` are non-persistent buffers."""

    label: str
    kind: str
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    hidden: dict[str, Tensor]
    training: dict[str, bool]


@dataclass
class Capsule:
    """One failing step.

    ``boundary`` says in words where it failed, ``phase`` in which part (input, forward, loss, backward). ``module``
    is the name of the called module below the failing root, ``number`` that of the call since a DataLoader yielded
    (since the step began, without one). ``models`` holds every root that owns parameters or buffers, the failing one
    first. ``args`` and ``kwargs`` are the call's, ``devices`` says where those not on the CPU were. ``batch`` is the
    DataLoader's (``loader`` is None without one). ``gradients`` are those that arrived at the call's outputs, by path;
    ``loss`` is the value handed to ``backward()``, None where none was seen. With a GradScaler they are scaled.
    """

    step: int
    micro_step: int
    boundary: str
    phase: str
    module: str
    number: int
    models: list[ModelState]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    devices: dict[str, str]
    batch: Any
    loader: LoaderFacts | None
    rng: dict[str, Any]
    autocast: list[tuple[str, bool, str]]
    gradients: dict[str, Tensor]
    loss: float | None = None
    loss_seen: bool = False
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    gradtrace_version: str = gradtrace.__version__

    @property
    def root(self) -> ModelState:
        """The root whose call failed."""
        return self.models[0]


def capsule_path(run_path: str | os.PathLike[str], rank: int = 0, world_size: int = 1, attempt: int = 0) -> Path:
    """Return where the capsule of a run belongs: beside its file, or in the directory of several ranks."""
    path = Path(run_path)
    if world_size > 1:
        again = f".attempt-{attempt}" if attempt else ""
        return path / f"rank-{rank}{again}.capsule.pt"
    return path.with_name(f"{path.name.removesuffix('.parquet')}.capsule.pt")


def clear_the_way(run_path: Path, moved_to: Path | None) -> None:
    """Take the capsule of an older run along to where that run was moved, or away if it was overwritten."""
    older = capsule_path(run_path)
    if older.is_file():
        if moved_to is None:
            older.unlink()
        else:
            older.replace(capsule_path(moved_to))


def save(path: str | os.PathLike[str], capsule: Capsule, limit: int) -> int:
    """Write a capsule, for its owner's eyes only, and return the file's size in bytes.

    ``limit`` is the most bytes that its tensors may take. A capsule that was there is replaced.

    Raises:
        CapsuleError: it exceeds the limit; nothing has been copied then.
        OSError: the file cannot be written.
    """
    document = {
        "mark": _MARK,
        "format": FORMAT,
        **{name.name: getattr(capsule, name.name) for name in dataclasses.fields(capsule)},
        "models": [dict(vars(state)) for state in capsule.models],
        "loader": None if capsule.loader is None else dict(vars(capsule.loader)),
    }
    size = stored_bytes(document)
    if size > limit:
        raise CapsuleError(f"the step takes {size_in_words(size)}, more than the limit of {size_in_words(limit)}")
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(_open_private(temporary), "wb") as file:
            torch.save(compact(document), file)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target.stat().st_size


def load(path: str | os.PathLike[str]) -> Capsule:
    """Read a capsule; all its tensors are on the CPU. Runs no code that the file may hold.

    Raises:
        RunNotFoundError: there is no such file.
        CapsuleError: it is no capsule, or a newer gradtrace or torch wrote it.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunNotFoundError(f"no such capsule: {path}") from None
    except (PermissionError, IsADirectoryError) as error:
        raise CapsuleError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch has many words for a file that it cannot read
        raise CapsuleError(_unreadable(path, error)) from None
    if not isinstance(document, dict) or document.get("mark") != _MARK:
        raise CapsuleError(f"{path} is no capsule of gradtrace")
    if document["format"] > FORMAT:
        raise CapsuleError(
            f"{path} is of capsule format {document['format']} (gradtrace {document['gradtrace_version']}); "
            f"this gradtrace reads up to {FORMAT}: upgrade gradtrace"
        )
    known = {f.name for f in dataclasses.fields(Capsule)}
    values = {key: value for key, value in document.items() if key in known}
    values["models"] = [ModelState(**state) for state in document["models"]]
    values["loader"] = None if document["loader"] is None else LoaderFacts(**document["loader"])
    return Capsule(**values)


def _open_private(path: Path) -> int:
    """Create a file that nobody else may read, from its first moment on."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _unreadable(path: str | os.PathLike[str], error: Exception) -> str:
    """Say why a file could not be loaded: a capsule of a newer torch, or none at all."""
    strings: list[Any] = []
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        strings = [argument for _, argument, _ in pickletools.genops(archive.read(name)) if isinstance(argument, str)]
    if _MARK not in strings:
        return f"{path} is no capsule of gradtrace"
    writer = strings[strings.index("torch_version") + 1] if "torch_version" in strings[:-1] else "another torch"
    reason = " ".join(str(error).split())[:120]
    return (
        f"{path} was written with torch {writer}, which torch {torch.__version__} cannot read ({reason}): upgrade torch"
    )


def size_in_words(size: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
