"""What a recording is asked for: checked, turned into a schedule, and shown in the file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

from gradtrace.capture.replay.alarm import OnNonFinite
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.watch.triggers import Triggers, WatchSchedule
from gradtrace.errors import CaptureError

Mode = Literal["full", "watch"]
Engine = Literal["graph", "hooks"]
Steps = tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Options:
    """The options of ``Tracer``, by their own names; see there.

    Raises:
        CaptureError: one of them makes no sense, or not with the others.
    """

    mode: Mode
    engine: Engine
    every: int
    steps: Steps
    first_step: int
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    replays: int
    on_nonfinite: OnNonFinite
    loss_lines: bool
    op_steps: Steps
    capsule_limit: int
    max_size: int
    triggers: Triggers
    baseline: str | os.PathLike[str] | None
    keep_compiled: bool

    def __post_init__(self) -> None:
        if self.mode not in ("full", "watch"):
            raise CaptureError(f"no such mode: {self.mode!r}; it is 'full' or 'watch'")
        if self.engine not in ("graph", "hooks"):
            raise CaptureError(f"no such engine: {self.engine!r}; it is 'graph' or 'hooks'")
        if self.mode == "watch" and self.engine == "hooks":
            raise CaptureError("the mode 'watch' needs the engine 'graph': 'hooks' keeps nothing for a replay")
        if self.keep_compiled and self.engine == "hooks":
            raise CaptureError("keep_compiled needs the engine 'graph': hooks on modules would be compiled, too")
        if self.keep_compiled and self.op_steps is not None:
            raise CaptureError("op_steps and keep_compiled exclude each other: no operation of compiled code is seen")
        if self.on_nonfinite not in ("continue", "stop"):
            raise CaptureError(f"no such on_nonfinite: {self.on_nonfinite!r}; it is 'continue' or 'stop'")
        if self.replays < 0:
            raise CaptureError(f"replays cannot be {self.replays}; 0 switches them off")
        if self.max_size < 0:
            raise CaptureError(f"max_size cannot be {self.max_size}; 0 leaves the recording unbounded")
        self.schedule()

    @property
    def op_range(self) -> range:
        """The steps of which every operation is recorded; without an end they never end."""
        if self.op_steps is None:
            return range(0)
        first, end = self.op_steps
        if end is not None and end <= (first or 0):
            raise CaptureError(f"no step lies in {first or 0}:{end}; A:B is A up to, not including, B")
        return range(first or 0, sys.maxsize if end is None else end)

    @property
    def keeps_passes(self) -> bool:
        """Whether anything is asked for that needs the calls of a pass to be kept."""
        wanted = self.replays or self.capsule_limit or self.on_nonfinite == "stop"
        return self.engine == "graph" and bool(wanted)

    def schedule(self) -> Schedule | WatchSchedule:
        """Return what decides which steps are captured in full."""
        asked_for = Schedule(self.every, *(self.steps or (None, None)), also=self.op_range)
        if self.mode == "full":
            return asked_for
        by_number = self.every > 1 or self.steps is not None
        return WatchSchedule(self.triggers, also=asked_for.captures if by_number else self.op_range.__contains__)

    def config(self) -> dict[str, Any]:
        """Return the options as the file shows them."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["triggers"] = vars(self.triggers) if self.mode == "watch" else None
        values["baseline"] = None if self.baseline is None else os.fspath(self.baseline)
        return values
