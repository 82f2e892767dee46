"""Engine ``hooks``: torch's own way, forward and full backward hooks registered on every module.

For those who want exactly what torch's hooks report, and as the oracle that the tests hold the other engine
against. What it cannot see, or bear, is in docs/how-it-works.md.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.capture.boundaries import Found
from gradtrace.capture.calls import Calls
from gradtrace.capture.frame import Frame
from gradtrace.capture.graph import sequence_number
from gradtrace.capture.names import ModuleEntry, Root, walk
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.voice import warn
from gradtrace.errors import CaptureError

_MOST_CALLS = 10_000
"""Of one module in one step, of which it is known by which node of the graph they are."""

CLEARED = "module whose hooks were cleared by the script: its calls and gradients are missing from then on"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_Gradients = Sequence[Tensor | None] | Tensor


class NoGradients:
    """Stands in where torch's hooks take care of the backward boundaries."""

    def call_begins(self, frame: Frame, inputs: Found, *, grad_mode: bool) -> None:
        """Note where in the autograd graph the call begins: by that its gradients are told apart."""
        frame.start = sequence_number()

    def call_returns(self, frame: Frame, outermost: Frame, outputs: Found) -> None:
        """Note where it ends."""
        frame.end = sequence_number()

    def watched_call_returns(self, frame: Frame, outputs: Found) -> None:
        """Nothing is kept."""

    def outermost_ended(self) -> None:
        """Nothing to drop."""


class ModuleHooks:
    """Registers hooks on every module of a root and reports the calls that they see."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles: dict[ModuleEntry, tuple[weakref.ref[nn.Module], list[Any]]] = {}
        self._forward_only: dict[Root, bool] = {}
        self._returned: dict[ModuleEntry, deque[Frame]] = defaultdict(lambda: deque(maxlen=_MOST_CALLS))
        self._cleared: set[ModuleEntry] = set()
        self._warned = False

    def register(self, root: Root, calls: Calls) -> None:
        """Hook every module below ``root`` that has no hooks yet.

        Where a module works in place, torch's full backward hooks would make the training fail: this root
        gets forward hooks only, and a warning says so.
        """
        top = root.ref()
        if top is None:
            return
        self._session.names.refresh(root)
        if root not in self._forward_only:
            self._forward_only[root] = self._cannot_bear(top)
        for _, module in walk(top):
            entry = self._session.names.entry(module)
            if entry is None or entry.transparent:
                continue
            known, handles = self._handles.get(entry, (None, []))
            if known is not entry.ref:
                _take_off(None if known is None else known(), handles)  # of the one whose place this one has taken
                self._handles[entry] = entry.ref, self._hook(module, entry, calls)

    def _cannot_bear(self, top: nn.Module) -> bool:
        try:
            refuse_in_place(top)
        except CaptureError as error:
            self._session.unmeasured["model without backward boundaries: a module works in place"] += 1
            warn(f"{error}; its backward boundaries are not recorded")
            return True
        return False

    def _hook(self, module: nn.Module, entry: ModuleEntry, calls: Calls) -> list[Any]:
        guarded = self._session.guarded
        begin, register = guarded(calls.begin), guarded(self.register)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if entry.is_root:
                calls.drop_all_of(self._cleared_now())
                register(entry.root, calls)  # what has been added since
            if entry not in self._cleared:  # nobody would say that the call has returned
                begin(module, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            frame = calls.innermost(entry)
            if frame is not None:
                self._ended(frame, result, calls)

        handles: list[Any] = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(guarded(after), with_kwargs=True, always_call=True),
        ]
        if entry.selected and not self._forward_only[entry.root]:
            handles += [
                module.register_full_backward_pre_hook(guarded(self._grad_output(entry))),
                module.register_full_backward_hook(guarded(self._grad_input(entry))),
            ]
        return handles

    def _ended(self, frame: Frame, result: Any, calls: Calls) -> None:
        if result is None:  # also when the call has raised
            self._explain(sys.exc_info()[1])
            calls.abandon(frame)
            return
        try:
            calls.finish(frame, result)
        except BaseException:
            calls.abandon(frame)
            raise
        if frame.captured and frame.phase in ("forward", "recompute"):
            self._returned[frame.entry].append(frame)

    def _explain(self, error: BaseException | None) -> None:
        if not self._warned and isinstance(error, RuntimeError) and "BackwardHookFunction" in str(error):
            self._warned = True
            warn(
                "torch raises this because of the hooks of engine='hooks': a tensor that enters or leaves a module is "
                "changed in place, which full backward hooks cannot bear; engine='graph' can"
            )

    def _grad_output(self, entry: ModuleEntry) -> Callable[[nn.Module, _Gradients], None]:
        def arrived(module: nn.Module, gradients: _Gradients) -> None:
            self._record(entry, "grad_output", gradients)

        return arrived

    def _grad_input(self, entry: ModuleEntry) -> Callable[[nn.Module, _Gradients, _Gradients], None]:
        def left(module: nn.Module, gradients: _Gradients, _: _Gradients) -> None:
            self._record(entry, "grad_input", gradients)

        return left

    def _record(self, entry: ModuleEntry, tensor: str, gradients: _Gradients) -> None:
        session = self._session
        if not session.capturing:
            return
        frame = self._call_of(entry)
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

    def _call_of(self, entry: ModuleEntry) -> Frame | None:
        """Return the call whose backward hook is running: its node was born when that call began or ended."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        born = node._sequence_nr()
        frames = reversed(self._returned[entry])
        return next((frame for frame in frames if frame.start <= born <= frame.end), None)

    def forget_calls(self) -> None:
        """Start a new step."""
        self._returned.clear()
        self._cleared_now()

    def _cleared_now(self) -> set[ModuleEntry]:
        """Return the modules whose hooks the script has taken off, and count those that are new."""
        for entry, (known, handles) in self._handles.items():
            module = known()
            if module is not None and entry not in self._cleared and not _are_on(module, handles):
                self._cleared.add(entry)
                self._session.unmeasured[CLEARED] += 1
        return self._cleared

    def remove(self) -> None:
        """Take all hooks off."""
        for known, handles in self._handles.values():
            _take_off(known(), handles)
        self._handles.clear()


def _are_on(module: nn.Module, handles: list[Any]) -> bool:
    return all(any(handle.id in getattr(module, name) for name in _HOOKS) for handle in handles)


def _take_off(module: nn.Module | None, handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
        for name in _HOOKS:  # a copy of the dictionary that the handle knows may have taken its place
            getattr(module, name, {}).pop(handle.id, None)


def refuse_in_place(top: nn.Module) -> None:
    """Raise CaptureError if a module below ``top`` works in place."""
    for name, module in walk(top):
        # Not getattr: the user's own ``__getattr__`` may raise anything.
        if module.__dict__.get("inplace") is True:
            raise CaptureError(
                f"torch's full backward hooks cannot bear {name or 'the root'} "
                f"({type(module).__name__} with inplace=True); use the engine graph"
            )
