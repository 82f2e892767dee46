"""The backward pass as a whole: when it runs, the loss it starts from, and what ``autograd.grad`` returns.

Wraps the one function through which ``backward()`` and ``autograd.grad`` reach the engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.capture.operations.op_steps import OpSteps
from gradtrace.capture.patching import Patch
from gradtrace.capture.session import Session, in_transform, quiet

_engine = Patch(torch.autograd, "_engine_run_backward")


class _Depth(threading.local):
    """Whether a thread is inside of a backward pass; one that runs in it (checkpointing) is part of it."""

    def __init__(self) -> None:
        self.inside = False


def _graph_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a pass keeps its graph and whether it makes one; torch's own calls pass both by position."""
    keeps = args[1] if len(args) > 1 else kwargs.get("keep_graph", kwargs.get("retain_graph", False))
    creates = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
    return bool(keeps), bool(creates)


class BackwardWatch:
    """Sees every backward pass of the process while it is installed."""

    def __init__(
        self,
        session: Session,
        on_begin: Callable[[Sequence[Any], bool], None],
        on_end: Callable[[bool, bool, BaseException | None], None],
        op_steps: OpSteps,
        on_returned: Callable[[Sequence[tuple[Tensor, Tensor]]], None],
    ) -> None:
        """``on_begin`` gets what the pass starts from, and whether the pass makes a graph of its own.

        ``on_end`` gets whether it accumulated gradients, whether its graph can be used again, and the error that
        ended it early, if one did. ``op_steps`` hears of passes inside of a pass, too. ``on_returned`` gets tensors
        with their gradients, as ``autograd.grad`` has returned them in a step that is only watched.
        """
        self._on_returned = on_returned
        self._op_steps = op_steps
        self._ops_begin = session.guarded(op_steps.backward_begins)
        self._ops_end = session.guarded(op_steps.backward_ended)
        self._session = session
        self._on_begin = session.guarded(on_begin)
        self._on_end = session.guarded(on_end)
        self._begin = session.guarded(self._backward_starts)
        self._record_returned = session.guarded(self._record_gradients_of_grad)
        self._thread = _Depth()

    def install(self) -> None:
        """Stand in for the function through which all backward passes run."""
        _engine.add(self._around)

    def remove(self) -> None:
        """Let passes run as before."""
        _engine.remove(self._around)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let passes of this thread run unseen for a while."""
        before, self._thread.inside = self._thread.inside, True
        self._op_steps.paused = True
        try:
            yield
        finally:
            self._thread.inside = before
            self._op_steps.paused = False

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        def _engine_run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            accumulating = bool(kwargs.get("accumulate_grad", False))
            if not self._session.active or in_transform():
                return original(outputs, *args, **kwargs)
            if thread.inside:
                return self._run(original, outputs, args, kwargs, accumulating)
            keeps_graph, creates_graph = _graph_options(args, kwargs)
            self._begin(outputs, accumulating)
            self._on_begin(outputs, creates_graph)
            thread.inside = True
            try:
                result = self._run(original, outputs, args, kwargs, accumulating)
            except BaseException as error:
                thread.inside = False
                self._on_end(accumulating, keeps_graph, error)
                raise
            thread.inside = False
            self._on_end(accumulating, keeps_graph, None)
            if not accumulating:
                self._record_returned(args, kwargs, result)
            return result

        return _engine_run_backward

    def _run(
        self,
        original: Callable[..., Any],
        outputs: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        accumulating: bool,
    ) -> Any:
        self._ops_begin(outputs)
        try:
            return original(outputs, *args, **kwargs)
        finally:
            self._ops_end(accumulating=accumulating)

    def _backward_starts(self, outputs: Sequence[Any], accumulating: bool) -> None:
        session = self._session
        session.clock.backward_starts()
        tensors = [t for t in outputs if isinstance(t, Tensor) and (accumulating or t.numel() == 1)]
        with quiet():
            for index, tensor in enumerate(tensors):
                path = str(index) if len(tensors) > 1 else ""
                session.record("loss", None, "loss", path, tensor, detail=session.clock.detail)

    def _record_gradients_of_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record what ``autograd.grad`` returned for known parameters: it reaches no ``.grad``."""
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        session = self._session
        if not session.capturing:
            pairs = zip(inputs, result, strict=False)
            self._on_returned([(t, g) for t, g in pairs if isinstance(t, Tensor) and isinstance(g, Tensor)])
            return
        with quiet():
            for tensor, gradient in zip(inputs, result, strict=False):
                entry = session.names.parameter(tensor) if isinstance(tensor, Tensor) else None
                if entry is None or gradient is None or not entry.owner.selected:
                    continue
                session.record("backward", entry.owner, "grad", entry.name, gradient, detail=session.clock.detail)
