"""What ``record`` was asked for. Data alone: the help of every command loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gradtrace.settings import Settings


@dataclass(frozen=True)
class RecordPlan:
    """The script, where its recording goes, and the settings of the recording."""

    script: str
    args: tuple[str, ...]
    is_module: bool
    path: str
    moves_aside: bool
    force: bool
    quiet: bool
    settings: Settings

    @property
    def existing(self) -> Literal["refuse", "overwrite", "move_aside"]:
        """What to do with an older run at ``path``, in the tracer's words."""
        if self.force:
            return "overwrite"
        return "move_aside" if self.moves_aside else "refuse"

    @property
    def command(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.script, *self.args]

    @property
    def leaves_out(self) -> bool:
        """Whether there are steps that are not to be captured in full."""
        return self.settings.mode == "watch" or self.settings.every > 1 or self.settings.steps is not None
