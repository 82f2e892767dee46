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
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

import gradtrace
from gradtrace.capture.recheck.batches import LoaderFacts
from gradtrace.capture.recheck.storages import compact, stored_bytes
from gradtrace.errors import CapsuleError, RunNotFoundError
from gradtrace.trace.checking import misfit

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
            _save(compact(document), file)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target.stat().st_size


def _save(document: Any, file: BinaryIO) -> None:
    """Let torch write; where the disk takes no more, torch's own error does not say so."""
    refused: list[OSError] = []

    def write(data: bytes) -> int:
        try:
            return file.write(data)
        except OSError as error:
            refused.append(error)
            raise

    try:
        torch.save(document, cast(BinaryIO, SimpleNamespace(write=write, flush=file.flush)))
    except RuntimeError as error:
        raise refused[0] if refused else error from None


def load(path: str | os.PathLike[str]) -> Capsule:
    """Read a capsule; all its tensors are on the CPU. Runs no code that the file may hold.

    Raises:
        RunNotFoundError: there is no such file.
        CapsuleError: it is no capsule, or a newer gradtrace or torch wrote it.
    """
    try:
        _demand_intact(path)
        document = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunNotFoundError(f"no such capsule: {path}") from None
    except CapsuleError:
        raise
    except OSError as error:
        raise CapsuleError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch has many words for a file that it cannot read
        raise CapsuleError(_unreadable(path, error)) from None
    if not isinstance(document, dict) or document.get("mark") != _MARK:
        raise CapsuleError(f"{path} is no capsule of gradtrace")
    version = document.get("format")
    if type(version) is int and version > FORMAT:
        raise CapsuleError(
            f"{path} is of capsule format {version} (gradtrace {document.get('gradtrace_version')}); "
            f"this gradtrace reads up to {FORMAT}: upgrade gradtrace"
        )
    try:
        if type(version) is not int:
            raise ValueError(f"its format is {version!r}")
        return _from(document)
    except ValueError as error:
        raise CapsuleError(f"{path} is a damaged capsule: {error}; record the failing step again") from None


def _from(document: dict[str, Any]) -> Capsule:
    """Return the capsule that ``save`` made a document of.

    Raises:
        ValueError: it is none; the message names what is wrong.
    """
    values = _fields(Capsule, document)
    values["models"] = [ModelState(**_fields(ModelState, state)) for state in document["models"]]
    if not values["models"]:
        raise ValueError("it has no model")
    if values["loader"] is not None:
        values["loader"] = LoaderFacts(**_fields(LoaderFacts, values["loader"]))
    return Capsule(**values)


def _fields(kind: type[Any], document: dict[Any, Any]) -> dict[str, Any]:
    names = [one.name for one in dataclasses.fields(kind)]
    missing = next((name for name in names if name not in document), None)
    if missing is not None:
        raise ValueError(f"it has no {missing}")
    values = {name: document[name] for name in names}
    wrong = misfit(kind, values)
    if wrong is not None:
        raise ValueError(f"its {wrong} is not what it should be")
    return values


def _demand_intact(path: str | os.PathLike[str]) -> None:
    """Compare the file with its checksums, which torch does not do.

    Raises:
        CapsuleError: it is no file that ``torch.save`` wrote, or it is damaged.
        OSError: it cannot be read.
    """
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise CapsuleError(f"{path} is damaged: {damaged} in it is not what was written; copy it again")


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
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if file.read(2) == b"PK":
                return f"{path} is no capsule of gradtrace, or it is cut off or damaged; copy it again"
        return f"{path} is no capsule of gradtrace"
    writer = strings[strings.index("torch_version") + 1] if "torch_version" in strings[:-1] else "another torch"
    # torch's first words are how to load it all the same, which is what nobody should do.
    lines = [line.strip() for line in str(error).splitlines()]
    reason = next((line for line in lines if "unsupported" in line.lower()), lines[0] if lines else "")[:120]
    if writer == str(torch.__version__):
        return f"{path} holds what no capsule does, and nothing of it was loaded: {reason}"
    return (
        f"{path} was written with torch {writer}, which torch {torch.__version__} cannot read ({reason}): upgrade torch"
    )


def size_in_words(size: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
