"""``Frame``: one open module call, and what may be done about its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from gradtrace.capture.boundaries import Found
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.replay.kept import Alive, Kept
from gradtrace.capture.sites import Site
from gradtrace.trace.incident import DETACHED


class Frame:
    """One open module call. ``captured`` says whether its inputs were seen: then its outputs are too.

    What most calls leave as it is stands in the class: a frame is made for every call.
    """

    captured = False
    start = end = 0
    input_edges: Mapping[Any, str] = MappingProxyType({})
    watched: Any = None
    kept: Kept | None = None
    alive: Alive | None = None
    inner: nn.Module | None = None
    """The module behind a wrapper that was called: its own call, if it comes, is this one."""

    def __init__(self, entry: ModuleEntry, phase: str, call: int, micro_step: int, is_outermost: bool) -> None:
        self.entry = entry
        self.sites = entry.sites[phase]
        self.phase = phase
        self.call = call
        self.micro_step = micro_step
        self.is_outermost = is_outermost


class Gradients(Protocol):
    """What is done about the backward boundaries of a call; called in ``quiet``."""

    def call_begins(self, frame: Frame, inputs: Found, *, grad_mode: bool) -> None: ...

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None: ...

    def watched_call_returns(self, frame: Frame, outputs: Found) -> None:
        """An outermost call returns in a step that is only watched."""

    def outermost_ended(self) -> None: ...


def output_site(frame: Frame, path: str, value: Tensor) -> Site:
    """Return where an output of a call is recorded, with a remark if nothing but a look at it was wanted."""
    site = frame.sites.output[path]
    return site.remarked(DETACHED) if frame.is_outermost and _is_only_looked_at(frame, value) else site


def _is_only_looked_at(frame: Frame, value: Tensor) -> bool:
    """Whether a value is the result of a metric: of a root without weights, and no gradient flows back from it."""
    return frame.phase == "forward" and not value.requires_grad and not frame.entry.root.owns_parameters
