"""Finds the first NaN of a training script with torch's own hooks alone: what the recording is held against.

Nothing here uses gradtrace. The script runs under torch's global module hooks, with a hook on every node of
the autograd graph, until the first step that holds a NaN is over. Infinities are looked for only when asked:
the -Inf of an attention mask is no finding. Arguments passed by name are not looked at.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass(frozen=True)
class Truth:
    """Where the first NaN of a run was made; ``op`` is the autograd node, for the backward pass only."""

    step: int
    phase: str
    module: str
    op: str | None = None


class _Found(Exception):
    """Ends the script once the step that holds the first NaN is over."""


@dataclass
class _Witness:
    infinities: bool
    step: int = 0
    truth: Truth | None = None
    names: dict[nn.Module, str] = field(default_factory=dict)
    owners: dict[Any, nn.Module] = field(default_factory=dict)
    stack: list[nn.Module] = field(default_factory=list)
    dirty: set[nn.Module] = field(default_factory=set)

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.stack:
            self.names = {child: name for name, child in module.named_modules()}
            self.owners.clear()
        outermost = not self.stack
        self.stack.append(module)
        if self.is_bad(args):
            self.dirty.add(module)
            if outermost:
                self.note(Truth(self.step, "input", self.names[module]))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.stack.pop()
        self.claim(module, args, output)
        if self.is_bad(output) and module not in self.dirty:
            self.note(Truth(self.step, "forward", self.names[module]))
        self.dirty.discard(module)

    def claim(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Make ``module`` the owner of the nodes between its arguments and its output that have none yet."""
        border = {tensor.grad_fn for tensor in _tensors(args)}
        for node in _nodes((tensor.grad_fn for tensor in _tensors(output)), border | self.owners.keys()):
            self.owners[node] = module

    def watch_backward(self, loss: torch.Tensor) -> None:
        for node in _nodes([loss.grad_fn], set()):
            node.register_hook(lambda made, given, node=node: self.judge(node, made, given))

    def judge(self, node: Any, made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        if self.is_bad(made) and not self.is_bad(given):
            owner = self.owners.get(node)
            phase = "backward" if owner is not None else "loss"
            self.note(Truth(self.step, phase, self.names.get(owner, ""), node.name()))

    def is_bad(self, values: Any) -> bool:
        """Whether one of the tensors in ``values`` holds a NaN, or an infinity where those are looked for."""
        return any(
            not bool(tensor.isfinite().all()) if self.infinities else bool(tensor.isnan().any())
            for tensor in _tensors(values)
        )

    def note(self, truth: Truth) -> None:
        self.truth = self.truth or truth

    def next_step(self, *_: Any) -> None:
        if self.truth is not None:
            raise _Found
        self.step += 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _nodes(starts: Iterable[Any], border: set[Any]) -> list[Any]:
    found: dict[Any, None] = {}
    waiting = [node for node in starts if node is not None and node not in border]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [n for n, _ in node.next_functions if n is not None and n not in border]
    return list(found)


@contextlib.contextmanager
def _watching(witness: _Witness) -> Iterator[None]:
    backward = torch.Tensor.backward

    def watched_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        witness.watch_backward(loss)
        backward(loss, *args, **kwargs)

    handles = [
        register_module_forward_pre_hook(witness.enter),
        register_module_forward_hook(witness.leave),
        register_optimizer_step_post_hook(witness.next_step),
    ]
    try:
        with mock.patch.object(torch.Tensor, "backward", watched_backward):
            yield
    finally:
        for handle in handles:
            handle.remove()


def first_nan(script: Path, *args: str, infinities: bool = False) -> Truth | None:
    """Run ``script`` with ``args`` and return where its first NaN was made, or None if there was none.

    With ``infinities`` that is the first value that is not finite.
    """
    witness = _Witness(infinities)
    with (
        _watching(witness),
        mock.patch.object(sys, "argv", [str(script), *args]),
        contextlib.suppress(_Found),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return witness.truth
