"""Keeps gradtrace's frames out of the stacks that the user's own anomaly detection notes and prints."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx.traceback

from gradtrace.capture.operations.stacks import without_own_frames
from gradtrace.capture.patching import Patch

format_stack = Patch(torch.fx.traceback, "format_stack")
"""What anomaly mode asks for a stack whenever an autograd node is made."""


class OwnFrames:
    """Leaves out gradtrace's frames while it is installed."""

    def install(self) -> None:
        """Stand in for the function that formats stacks."""
        format_stack.add(self._around)

    def remove(self) -> None:
        """Put torch's own function back."""
        format_stack.remove(self._around)

    def _around(self, original: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: without_own_frames(original())
