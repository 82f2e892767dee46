"""Source lines for the loss code: anomaly mode's stacks, without its checks, between a root's exit and backward.

The mode is one switch for the whole process and may be the user's too. So the user's own setting is kept apart
from what is switched on here: the user reads what the user has set, and what the user sets holds. Only says when
stacks are noted; ``operations/stacks.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradtrace.capture.operations.stacks import brief_stack
from gradtrace.capture.own_frames import format_stack
from gradtrace.capture.patching import Patch

_set = Patch(torch, "set_anomaly_enabled")
_is_enabled = Patch(torch, "is_anomaly_enabled")
_checks_nan = Patch(torch, "is_anomaly_check_nan_enabled")

_switch: Callable[[bool, bool], None] = torch._C.set_anomaly_enabled  # torch.autograd's classes would warn
_enabled: Callable[[], bool] = torch._C.is_anomaly_enabled
_checks: Callable[[], bool] = torch._C.is_anomaly_check_nan_enabled


class LossLines:
    """Switches the noting of stacks on for the loss code, and off for everything else.

    The loss code begins when an outermost call has returned something with a graph; other outermost calls (an
    evaluation, another model) and backward passes interrupt it; a backward that frees the graph ends it.
    """

    def __init__(self) -> None:
        self._in_loss_code = False
        self._interrupted = False
        self._before: bool | None = None
        """What the user has set about checks, while stacks are noted; None while they are not."""

    def install(self) -> None:
        """Keep the user's setting apart from now on."""
        _set.add(self._around_set)
        _is_enabled.add(self._around_is_enabled)
        _checks_nan.add(self._around_checks_nan)
        format_stack.add(self._around_format_stack)

    def remove(self) -> None:
        """End the loss code, and leave nothing but the user's setting."""
        self.end()
        _set.remove(self._around_set)
        _is_enabled.remove(self._around_is_enabled)
        _checks_nan.remove(self._around_checks_nan)
        format_stack.remove(self._around_format_stack)

    @property
    def noting(self) -> bool:
        """Whether stacks are noted because of this object."""
        return self._before is not None

    def call_begins(self) -> None:
        """Note that an outermost call begins."""
        self._interrupted = True
        self._off()

    def call_ended(self, *, has_graph: bool) -> None:
        """Note that an outermost call has returned, or raised; ``has_graph``: an output has an autograd history."""
        self._in_loss_code = self._in_loss_code or has_graph
        self._interrupted = False
        self._resume()

    def backward_begins(self, *, create_graph: bool) -> None:
        """Note that a pass begins; what it makes with ``create_graph`` is loss code too."""
        if not create_graph:
            self._interrupted = True
            self._off()

    def backward_ended(self, *, keeps_graph: bool) -> None:
        """Note that a pass has ended; ``keeps_graph``: it was ``autograd.grad``, or the graph can be used again."""
        self._interrupted = False
        if keeps_graph:
            self._resume()
        else:
            self.end()

    def end(self) -> None:
        """End the loss code: a step is over, or the steps that follow are not captured in full."""
        self._in_loss_code = False
        self._off()

    def _resume(self) -> None:
        if self._in_loss_code and not self._interrupted and self._before is None and not _enabled():
            self._before = _checks()
            _switch(True, False)

    def _off(self) -> None:
        before, self._before = self._before, None
        # Anything else was set past torch's own functions, by somebody who wants it.
        if before is not None and _enabled() and not _checks():
            _switch(False, before)

    # What the user's calls come to -------------------------------------------------------------------------------

    def _around_set(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_anomaly_enabled(*args: Any, **kwargs: Any) -> Any:
            self._off()
            result = original(*args, **kwargs)
            self._resume()
            return result

        return set_anomaly_enabled

    def _around_is_enabled(self, original: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: self._before is None and original()

    def _around_checks_nan(self, original: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: original() if self._before is None else self._before

    def _around_format_stack(self, original: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: original() if self._before is None else brief_stack()
