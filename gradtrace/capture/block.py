"""``gradtrace.trace``: a recording as a block of the user's own program, as its arguments and the settings have it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gradtrace.capture.watch.triggers import Triggers
from gradtrace.settings import SETTINGS, Settings, load, trace_switch
from gradtrace.trace.runinfo import RunInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gradtrace.capture.models import Models
    from gradtrace.capture.options import Engine
    from gradtrace.capture.replay.alarm import OnNonFinite
    from gradtrace.capture.tracer import Tracer
    from gradtrace.setting_kinds import StepRange
    from gradtrace.settings import Mode

_WATCH = "watch_"


class Unset:
    """Stands for an argument that is not given, and shows what it is then by default."""

    def __init__(self, default: object) -> None:
        self._default = default

    def __repr__(self) -> str:
        return repr(self._default)


_unset: Any = SimpleNamespace(**{key: Unset(setting.default) for key, setting in SETTINGS.items()})


def trace(
    models: Models,
    path: str | os.PathLike[str] = "run.parquet",
    *,
    overwrite: bool = False,
    mode: Mode = _unset.mode,
    every: int = _unset.every,
    steps: StepRange | None = _unset.steps,
    first_step: int = _unset.first_step,
    include: Sequence[str] = _unset.include,
    exclude: Sequence[str] = _unset.exclude,
    engine: Engine = _unset.engine,
    op_steps: StepRange | None = _unset.op_steps,
    keep_compiled: bool = _unset.keep_compiled,
    loss_lines: bool = _unset.loss_lines,
    max_size: int = _unset.max_size,
    on_nonfinite: OnNonFinite = _unset.on_nonfinite,
    replays: int = _unset.replays,
    capsule_limit: int = _unset.capsule_limit,
    baseline: str | os.PathLike[str] | None = _unset.baseline,
    watch_first: int = _unset.watch_first,
    watch_after: int = _unset.watch_after,
    watch_lr_factor: float = _unset.watch_lr_factor,
    watch_spike_factor: float = _unset.watch_spike_factor,
    watch_spike_window: int = _unset.watch_spike_window,
    watch_share: float = _unset.watch_share,
    watch_changed_first: int = _unset.watch_changed_first,
) -> Tracer | Untraced:
    """Return a tracer to be used in a ``with`` statement; see ``Tracer`` and ``Triggers`` for the arguments.

    What is not given is as configured: by variables ``GRADTRACE_*`` or in pyproject.toml. The variable ``GRADTRACE``
    is above the argument ``mode``: ``watch``, ``full``, or ``off``, with which nothing is recorded.

    Example::

        with gradtrace.trace(model, "run.parquet") as tracer:
            train(model)
        gradtrace.open_run(tracer.path).sql("select * from records where nan_count > 0")

    Raises:
        CaptureError: an argument or a setting makes no sense; also when the block is entered.
        RunExistsError: an older run is at ``path``, when the block is entered.
        RunNotFoundError, NotARunError: ``baseline`` is no run that can be read.
    """
    arguments = locals()
    switch = trace_switch()
    if switch == "off":
        return Untraced(path)
    given = {key: arguments[key] for key in SETTINGS if not isinstance(arguments[key], Unset)}
    settings = load(given if switch is None else given | {"mode": switch})

    from gradtrace.capture.tracer import Tracer

    existing: Any = "overwrite" if overwrite else "refuse"
    return Tracer(models, path, existing=existing, command=list(sys.argv), **tracer_arguments(settings))


def tracer_arguments(settings: Settings) -> dict[str, Any]:
    """Return the settings as keyword arguments of ``Tracer``.

    Raises:
        CaptureError: the triggers of watch mode make no sense.
    """
    values = {key: getattr(settings, key) for key in SETTINGS}
    triggers = {key.removeprefix(_WATCH): values.pop(key) for key in SETTINGS if key.startswith(_WATCH)}
    return {**values, "triggers": Triggers(**triggers)}


class Untraced:
    """What ``trace`` returns where ``GRADTRACE`` is off: it has what a ``Tracer`` has, and does nothing.

    ``path`` is what was asked for; nothing is written there.
    """

    moved_to: Path | None = None
    bytes_written = 0
    in_one_file = is_in_place = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.info = RunInfo(run_id="", end="off")

    def start(self) -> Untraced:
        """Do nothing."""
        return self

    def stop(self, end: str = "completed") -> RunInfo:
        """Do nothing."""
        return self.info

    def stop_quickly(self, end: str) -> RunInfo:
        """Do nothing."""
        return self.info

    def step(self, number: int | None = None) -> None:
        """Do nothing."""

    def __enter__(self) -> Untraced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""
