"""What the callbacks of all trainers share: one recording for each training, with what ``gradtrace.trace`` takes."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gradtrace.errors import CaptureError, MissingPackageError

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from gradtrace.capture.block import Untraced
    from gradtrace.capture.tracer import Tracer


class Callback:
    """Records each training that its trainer runs, and counts steps as the trainer does.

    The first training goes to ``path``, the second one of the same callback to ``run.training-2.parquet``, and so on;
    with several ranks each is a directory. ``overwrite`` and ``settings`` are those of ``gradtrace.trace``, with the
    same precedence, except for ``first_step``: the trainer's own count is the number of a step.

    A subclass says in ``bases`` where the trainer's own class of callbacks is. An instance is one of that class, too:
    of those of all packages that are loaded by then, otherwise of the first one that is installed. It holds nothing
    that a checkpoint would save, and can be copied and pickled, without the recording in progress.

    Raises:
        CaptureError: an argument or a setting makes no sense.
        MissingPackageError: the trainer's package is not installed.
        RunExistsError: an older run is at ``path``, when a training starts.
    """

    bases: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Modules, the preferred one first, and the name of the class in each."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        asked_for: Any = cls
        made: Self = object.__new__(_with_bases(asked_for, tuple(_trainers_own(cls.bases))))
        return made

    def __init__(
        self, path: str | os.PathLike[str] = "run.parquet", *, overwrite: bool = False, **settings: Any
    ) -> None:
        self._path = Path(path)
        self._options = {"overwrite": overwrite, **settings}
        self._trainings = 0
        self._tracer: Tracer | Untraced | None = None
        _check(settings)
        self._make(None, 0)  # so that what makes no sense is said here, not after an hour of loading data

    @property
    def path(self) -> Path:
        """The latest recording, which the commands and ``gradtrace.open_run`` take, also while it goes on."""
        number = f".training-{self._trainings}" if self._trainings > 1 else ""
        return self._path.with_name(f"{self._path.stem}{number}{self._path.suffix}")

    def _make(self, model: nn.Module | None, first_step: int) -> Tracer | Untraced:
        from gradtrace.capture.block import trace

        return trace(model, self.path, first_step=first_step, **self._options)

    def _start(self, model: nn.Module, step: int) -> None:
        self._stop("interrupted: another training has begun")
        self._trainings += 1
        self._tracer = self._make(model, step).start()

    def _step(self, number: int) -> None:
        if self._tracer is not None:
            self._tracer.step(number)

    def _stop(self, end: str) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.stop(end)

    def _failed(self, error: BaseException) -> None:
        self._stop(f"exception {type(error).__name__}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning puts bound methods of its model onto callbacks.
        state = {name: value for name, value in vars(self).items() if not inspect.ismethod(value)}
        return _made_again, (vars(type(self)).get("made_from", type(self)), state | {"_tracer": None})


def _made_again(made_from: type[Callback], state: dict[str, Any]) -> Callback:
    callback = made_from.__new__(made_from)
    vars(callback).update(state)
    return callback


def _check(settings: dict[str, Any]) -> None:
    from gradtrace.capture.block import trace

    known = set(inspect.signature(trace).parameters) - {"models", "path", "first_step"}
    unknown = [name for name in settings if name not in known]
    if unknown:
        reason = "the trainer's own count is the number of a step" if unknown[0] == "first_step" else "no such setting"
        raise CaptureError(f"{unknown[0]}: {reason}; a callback takes {', '.join(sorted(known))}")


def _trainers_own(places: Sequence[tuple[str, str]]) -> list[type]:
    """Return the classes of callbacks that the trainer at hand may ask for."""
    loaded = [getattr(sys.modules[module], name) for module, name in places if module in sys.modules]
    if loaded or not places:
        return loaded
    for module, name in places:
        try:
            return [getattr(importlib.import_module(module), name)]
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "?"):  # it is there, and lacks something itself
                raise
    package = places[0][0].partition(".")[0]
    raise MissingPackageError(f"this callback needs {package}; to install it: pip install {package}")


@functools.cache
def _with_bases(cls: type[Callback], bases: tuple[type, ...]) -> type[Any]:
    missing = tuple(base for base in bases if not issubclass(cls, base))
    if not missing:
        return cls
    body = {"made_from": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, *missing), body)
