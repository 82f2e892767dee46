"""Runs a script up to its first non-finite gradient and makes a capsule of that step, by means of its own."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradtrace.capture import interception
from gradtrace.capture.boundaries import tensors_in_result
from gradtrace.capture.clock import Clock
from gradtrace.capture.names import ModuleEntry, Names, Root
from gradtrace.capture.patching import Patch
from gradtrace.capture.recheck.batches import Batches
from gradtrace.capture.recheck.capsule import Capsule
from gradtrace.capture.recheck.contents import capsule_of
from gradtrace.capture.replay.rng import Rng
from gradtrace.capture.roots import find_root
from gradtrace.capture.rows import RowBuffer
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.session import Session
from gradtrace.capture.statistics import Statistics


def a_session() -> Session:
    """Return a session that nothing else takes part in."""
    return Session(Names((), ()), Schedule(), Clock(0), RowBuffer(0), Statistics())


@dataclass
class HandKept:
    """A root call, kept by hand."""

    entry: ModuleEntry
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rng: Rng = field(default_factory=Rng.now)
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = (("cpu", False, torch.bfloat16),)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    number: int = 0
    number_in_step: tuple[int, int] = (-1, 0)


def keep(module: nn.Module, *args: Any, label: str = "model", **kwargs: Any) -> HandKept:
    """Keep a call of ``module`` that is about to happen."""
    root = Root(module, label, label)
    copies = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    return HandKept(ModuleEntry(module, root, "", True), module, args, kwargs, buffers=copies)


class _Failed(BaseException):
    pass


class _Keeper:
    """Keeps the last outermost call in grad mode and the gradients of its outputs."""

    def __init__(self) -> None:
        self.kept: HandKept | None = None
        self.batches = Batches(a_session())
        self._inside = False

    def around(self, call: interception.Call) -> interception.Call:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            self._inside = True
            top, label = find_root(module)
            kept = self.kept = keep(top, *args, label=label, **kwargs)
            kept.number = self.batches.call_begins(label)
            result = call(module, *args, **kwargs)
            for path, tensor in tensors_in_result(result):
                tensor.register_hook(lambda g, path=path: kept.gradients.__setitem__(path, g.detach()))
            self._inside = False
            return result

        return __call__


@contextlib.contextmanager
def _running(script: Path) -> Iterator[None]:
    argv = sys.argv
    sys.argv = [os.fspath(script)]
    try:
        yield
    finally:
        sys.argv = argv


def failing_step(script: Path, phase: str, *, at_step: int | None = None) -> Capsule:
    """Run ``script`` and return the capsule of step ``at_step``, or of the first with a non-finite loss or gradient."""
    keeper, steps, capsules, losses = _Keeper(), [0], [], []

    def around(original: Any) -> Any:
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            losses[:] = [output.detach() for output in outputs]
            return original(outputs, *args, **kwargs)

        return run

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        failed = not all(tensor.isfinite().all() for tensor in (*gradients, *losses))
        if failed if at_step is None else steps[0] == at_step:
            kept = keeper.kept
            assert kept is not None
            facts: Any = {"step": steps[0], "micro_step": 0, "phase": phase, "boundary": phase, "number": kept.number}
            yielded = keeper.batches.of_call(kept.args, kept.kwargs)
            capsules.append(capsule_of(kept, yielded=yielded, loss=losses[0].item(), loss_seen=True, **facts))
            raise _Failed
        steps[0] += 1
        keeper.batches.forget()

    engine = Patch(torch.autograd, "_engine_run_backward")
    engine.add(around)
    hook = register_optimizer_step_pre_hook(before_step)
    interception.add(keeper)
    keeper.batches.install()
    try:
        with _running(script), contextlib.suppress(_Failed):
            runpy.run_path(os.fspath(script), run_name="__main__")
    finally:
        engine.remove(around)
        keeper.batches.remove()
        interception.remove(keeper)
        hook.remove()
    (capsule,) = capsules
    return capsule
