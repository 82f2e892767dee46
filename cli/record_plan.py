"""What ``record`` was asked for. Data alone: the help of every command loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RecordPlan:
    """The options of ``record``, by their own names."""

    script: str
    args: tuple[str, ...]
    is_module: bool
    path: str
    moves_aside: bool
    force: bool
    every: int
    steps: tuple[int | None, int | None] | None
    first_step: int
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    engine: Literal["graph", "hooks"]
    replays: int
    on_nonfinite: Literal["continue", "stop"]
    no_loss_lines: bool
    op_steps: tuple[int | None, int | None] | None
    capsule_limit: int
    no_capsule: bool
    quiet: bool

    @property
    def existing(self) -> Literal["refuse", "overwrite", "move_aside"]:
        """What to do with an older run at ``path``, in the tracer's words."""
        if self.force:
            return "overwrite"
        return "move_aside" if self.moves_aside else "refuse"

    @property
    def command(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.script, *self.args]
