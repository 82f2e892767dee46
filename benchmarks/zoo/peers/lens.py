"""torchlens: every training call of a model is traced, then ``bisect_nan`` is asked, and ``bisect_nan_backward``.

The tool is told nothing about which step fails: it is asked at every step, and its first finding counts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torchlens
from torch import nn

from benchmarks.zoo.peers.watching import QUIET, Answer, execute, iteration

CAPTURE = torchlens.options.CaptureOptions(
    save_grads=True, backward_ready=True, save_code_context=True, recurrence_detection=False
)


class Found(Exception):
    """Ends the script with the finding."""


def watch(script: Path) -> Answer:
    """Run the script with its models traced and return the tool's first finding."""
    traces: list[Any] = []
    busy = [False]  # in a traced call, or in a backward pass: checkpointing calls modules there once more
    _trace_calls(traces, busy)
    _record_backward(traces, busy)
    error = execute(script)
    if isinstance(error, Found):
        answer: Answer = error.args[0]
        return answer
    if error is not None:
        return QUIET | {"note": f"crashed: {type(error).__name__}: {str(error).splitlines()[0]}"}
    return QUIET


def _trace_calls(traces: list[Any], busy: list[bool]) -> None:
    plain = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if busy[0] or not torch.is_grad_enabled() or not any(True for _ in self.parameters()):
            return plain(self, *args, **kwargs)
        busy[0], returned = True, []
        wrapped = getattr(self, "module", self)  # the tool unwraps DDP and DataParallel
        handle = wrapped.register_forward_hook(lambda module, inputs, output: returned.append(output))
        try:
            traces.append(torchlens.trace(self, args, kwargs, capture=CAPTURE))
        finally:
            handle.remove()
            busy[0] = False
        _ask_forward(traces[-1])
        return returned[-1]

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _record_backward(traces: list[Any], busy: list[bool]) -> None:
    plain = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        asked, traces[:], busy[0] = list(traces), [], True
        try:
            with contextlib.ExitStack() as stack:
                for trace in asked:
                    stack.enter_context(trace.recording_backward())
                plain(self, *args, **kwargs)
        finally:
            busy[0] = False
        for trace in asked:
            _ask_backward(trace)

    torch.Tensor.backward = backward  # type: ignore[method-assign]


def _ask_forward(trace: Any) -> None:
    result = torchlens.debug.bisect_nan(trace)
    if result.found:
        inside = result.op.modules[-1].split(":")[0] if result.op.modules else ""
        raise Found(_answer("forward", inside, result.op.grad_fn_class_name, result.source_line))


def _ask_backward(trace: Any) -> None:
    """Ask about the last backward pass through the traced call; there is none where the loss did not need it."""
    passes = len(trace.backward_passes)
    birth = torchlens.debug.bisect_nan_backward(trace, bwd=passes).birth if passes else None
    if birth is not None:
        raise Found(_answer("backward", birth.module, birth.grad_fn_class, birth.source_line))


def _answer(phase: str, module: str | None, op: str | None, source: str | None) -> Answer:
    """Put a finding into this project's words."""
    file, _, line = (source or "").rpartition(":")
    location = {"file": file, "line": int(line)} if file else None
    return {
        "found": True,
        "iteration": iteration(),
        "phase": phase,
        "module": module,
        "op": op,
        "location": location,
    }
