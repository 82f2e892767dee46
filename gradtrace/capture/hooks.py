"""Engine ``hooks``: torch's own way, forward and full backward hooks registered on every module.

For those who want exactly what torch's hooks report, and as the oracle that the tests hold the other engine
against. What it cannot see, or bear, is in docs/how-it-works.md.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gradtrace.capture.boundaries import Found
from gradtrace.capture.calls import Calls, Frame
from gradtrace.capture.names import ModuleEntry, Root, walk
from gradtrace.capture.session import Session, quiet
from gradtrace.errors import CaptureError

_Gradients = Sequence[Tensor | None] | Tensor


class NoGradients:
    """Stands in where torch's hooks take care of the backward boundaries."""

    def call_begins(self, frame: Frame, outermost: Frame) -> None:
        """Nothing to take."""

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """Nothing to hook."""

    def outermost_ended(self) -> None:
        """Nothing to drop."""


class ModuleHooks:
    """Registers hooks on every module of a root and reports the calls that they see."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self._open: dict[int, list[Frame]] = defaultdict(list)
        self._returned: dict[ModuleEntry, list[Frame]] = defaultdict(list)

    def register(self, root: Root, calls: Calls) -> None:
        """Hook every module below ``root``.

        Raises:
            CaptureError: a module works in place, which torch's full backward hooks do not allow.
        """
        top = root.ref()
        if top is None or id(root) in self._hooked:
            return
        refuse_in_place(top)
        self._hooked.add(id(root))
        for _, module in walk(top):
            entry = self._session.names.entry(module)
            if entry is not None and not entry.transparent:
                self._hook(module, entry, calls)

    def _hook(self, module: nn.Module, entry: ModuleEntry, calls: Calls) -> None:
        begin = self._session.guarded(calls.begin)
        key = id(module)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            frame = begin(module, args, kwargs)
            if frame is not None:
                self._open[key].append(frame)

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if self._open[key]:
                self._ended(self._open[key].pop(), result, calls)

        guarded = self._session.guarded
        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(guarded(after), with_kwargs=True, always_call=True),
        ]
        if entry.selected:
            reference = weakref.ref(entry)
            self._handles += [
                module.register_full_backward_pre_hook(guarded(self._grad_output(reference))),
                module.register_full_backward_hook(guarded(self._grad_input(reference))),
            ]

    def _ended(self, frame: Frame, result: Any, calls: Calls) -> None:
        if result is None:
            calls.abandon(frame)
            return
        calls.finish(frame, result)
        if frame.phase in ("forward", "recompute"):
            self._returned[frame.entry].append(frame)

    def _grad_output(self, reference: weakref.ref[ModuleEntry]) -> Any:
        def arrived(module: nn.Module, gradients: _Gradients) -> None:
            entry = reference()
            if entry is not None:
                frames = self._returned[entry]
                self._record(entry, frames[-1] if frames else None, "grad_output", gradients)

        return arrived

    def _grad_input(self, reference: weakref.ref[ModuleEntry]) -> Any:
        def left(module: nn.Module, gradients: _Gradients, _: _Gradients) -> None:
            entry = reference()
            if entry is not None:
                # torch does not say which call this is: in backward, the last call comes first.
                frames = self._returned[entry]
                self._record(entry, frames.pop() if frames else None, "grad_input", gradients)

        return left

    def _record(self, entry: ModuleEntry, frame: Frame | None, tensor: str, gradients: _Gradients) -> None:
        session = self._session
        if not session.capturing:
            return
        with quiet():
            for index, gradient in enumerate([gradients] if isinstance(gradients, Tensor) else gradients):
                if gradient is not None:
                    session.record(
                        "backward",
                        entry,
                        tensor,
                        str(index),
                        gradient,
                        call=frame.call if frame else None,
                        micro_step=frame.micro_step if frame else None,
                        detail=session.clock.detail,
                    )

    def forget_calls(self) -> None:
        """Start a new step."""
        self._returned.clear()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def refuse_in_place(top: nn.Module) -> None:
    """Raise CaptureError if a module below ``top`` works in place."""
    for name, module in walk(top):
        if getattr(module, "inplace", False) is True:
            raise CaptureError(
                f"torch's full backward hooks cannot bear {name or 'the root'} "
                f"({type(module).__name__} with inplace=True); use the engine graph"
            )
