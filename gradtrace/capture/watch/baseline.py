"""The model of an earlier run, to be compared with the one that is being trained: modules, types, parameter shapes.

Only what the earlier run says of itself is read, not its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gradtrace.errors import NoMatchError, NotARunError, RunNotFoundError
from gradtrace.trace.parts import INFO_FILE, parts_of
from gradtrace.trace.runinfo import METADATA_KEY, ModuleInfo, RunInfo
from gradtrace.trace.schema import LARGE_FOOTERS


class Baseline:
    """The modules of an earlier run."""

    def __init__(self, modules: Sequence[ModuleInfo]) -> None:
        """``modules`` are in model order: after an outermost module come those inside of it."""
        self._modules = {module.name: module for module in modules}
        self._inside: dict[str, list[ModuleInfo]] = {}
        root = ""
        for module in modules:
            root = module.name if module.root else root
            self._inside.setdefault(root, []).append(module)

    @classmethod
    def of(cls, path: str | os.PathLike[str], *, rank: int = 0) -> Baseline:
        """Read the run at ``path``: a file, the directory of several ranks, or a run that has not been finished.

        Of several ranks the one with the number ``rank`` is read, or the first where there is none.

        Raises:
            RunNotFoundError: there is no run at ``path``.
            NotARunError: what is there is no run that this gradtrace can read.
            NoMatchError: the run has no modules.
        """
        place = Path(path)
        parts = place if place.suffix == ".parts" else parts_of(place)
        if place.is_dir() and place != parts:
            info = _of_directory(place, rank)
        elif place.is_file():
            info = _of_file(place)
        elif parts.is_dir():
            info = _of_parts(parts)
        else:
            raise RunNotFoundError(f"no such run: {path}")
        if not info.modules:
            raise NoMatchError(f"{path} has no modules to compare the model with: nothing was called in that run")
        return cls(info.modules)

    def difference(self, modules: Sequence[ModuleInfo]) -> str | None:
        """Say in words in what ``modules`` differ from the earlier run's; None where they do not.

        Outermost modules that have not been called yet are unknown, so one that is missing is no difference.
        """
        found = [*self._new_or_changed(modules), *self._gone(modules)]
        if not found:
            return None
        return found[0] if len(found) == 1 else f"{found[0]}, and {len(found) - 1:,} more"

    def _new_or_changed(self, modules: Sequence[ModuleInfo]) -> Iterator[str]:
        for module in modules:
            before = self._modules.get(module.name)
            if before is None:
                yield f"{_name(module)} ({module.type}) is new"
            elif module.type != before.type:
                yield f"{_name(module)} is {module.type}, was {before.type}"
            else:
                yield from _parameters(module, before)

    def _gone(self, modules: Sequence[ModuleInfo]) -> Iterator[str]:
        now = {module.name for module in modules}
        for root in dict.fromkeys(module.name for module in modules if module.root):
            for before in self._inside.get(root, ()):
                if before.name not in now:
                    yield f"{_name(before)} ({before.type}) is gone"


def _parameters(module: ModuleInfo, earlier: ModuleInfo) -> Iterator[str]:
    now, before = module.parameters, earlier.parameters
    for name in {**now, **before}:
        full = f"{module.name}.{name}" if module.name else name
        if name not in before:
            yield f"{full} {now[name]} is new"
        elif name in now and now[name] != before[name]:
            yield f"{full} is {now[name]}, was {before[name]}"
        elif name not in now and not module.type.startswith("Lazy"):  # those have no shapes before their first call
            yield f"{full} {before[name]} is gone"


def _name(module: ModuleInfo) -> str:
    return module.name or "(root)"


def _of_directory(directory: Path, rank: int) -> RunInfo:
    """Read the rank's file, of the first attempt; a rank that is still in its parts has no file."""
    names = {path.name.removesuffix(".parts") for path in directory.glob("rank-*.parquet*")}
    if not names:
        raise NotARunError(f"{directory} is a directory without a run in it")
    wanted = f"rank-{rank}.parquet"
    file = directory / (wanted if wanted in names else min(names))
    return _of_file(file) if file.is_file() else _of_parts(parts_of(file))


def _of_file(path: Path) -> RunInfo:
    try:
        with pq.ParquetFile(path, **LARGE_FOOTERS) as file:
            metadata = file.schema_arrow.metadata or {}
    except pa.ArrowException:
        raise NotARunError(f"{path} is not a Parquet file") from None
    except OSError as error:
        raise NotARunError(f"{path} cannot be read: {error.strerror or error}") from None
    if METADATA_KEY not in metadata:
        raise NotARunError(f"{path} is a Parquet file, but not a gradtrace run")
    return RunInfo.from_json(metadata[METADATA_KEY], str(path))


def _of_parts(directory: Path) -> RunInfo:
    file = directory / INFO_FILE
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise NotARunError(f"{directory.with_suffix('')} is no whole run: {file} is missing") from None
    except OSError as error:
        raise NotARunError(f"{file} cannot be read: {error.strerror}") from None
    return RunInfo.from_json(text, str(file))
