"""The floor of what seeing every tensor costs: one extra read, ``x.sum()``, of each distinct boundary tensor.

Boundary tensors are the floating-point ones that enter and leave a module, the gradients there, the parameters'
gradients as they arrive and the parameters after each optimizer step. Many cross several boundaries and are read
once. Which ones are distinct is found out in one step beforehand, so that the timed ones do little else than read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from benchmarks.models import Training

Read = Callable[[Tensor], object]


@dataclass
class Reads:
    """What is read at one call of a module, as positions among its tensors.

    A gradient at an input is an edge of a node: the way to the node from an output's (its position, then indexes
    into ``next_functions``), and the edge's index.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    grad_outputs: list[int] = field(default_factory=list)
    grad_inputs: list[tuple[tuple[int, ...], int]] = field(default_factory=list)


Plan = dict[nn.Module, list[Reads]]
"""The calls of a step, module by module."""


class Floor:
    """Reads each distinct boundary tensor of a training's steps once; making it trains for one step."""

    def __init__(self, training: Training, read: Read = Tensor.sum) -> None:
        self._training = training
        self._read = read
        self._plan = _Planner().plan(training)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read from now on until the block ends."""
        training, read = self._training, self._read
        parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]

        def after_step(*_: Any) -> None:
            for parameter in parameters:
                read(parameter.detach())

        with ExitStack() as undo:
            for module, calls in self._plan.items():
                if any(call.inputs for call in calls):
                    undo.callback(module.register_forward_pre_hook(_on_entry(calls, read)).remove)
                if any(call.outputs or call.grad_outputs or call.grad_inputs for call in calls):
                    undo.callback(module.register_forward_hook(_on_exit(calls, read)).remove)
            for parameter in parameters:
                undo.callback(parameter.register_post_accumulate_grad_hook(lambda it: _read_gradient(it, read)).remove)
            undo.callback(training.optimizer.register_step_post_hook(after_step).remove)
            yield


def _read_gradient(parameter: Tensor, read: Read) -> None:
    assert parameter.grad is not None
    read(parameter.grad)


def _on_entry(calls: list[Reads], read: Read) -> Callable[[nn.Module, Any], None]:
    turn = cycle(calls)

    def on_entry(module: nn.Module, args: Any) -> None:
        found = _tensors(args)
        for position in next(turn).inputs:
            read(found[position].detach())

    return on_entry


def _on_exit(calls: list[Reads], read: Read) -> Callable[[nn.Module, Any, Any], None]:
    turn = cycle(calls)

    def on_exit(module: nn.Module, args: Any, result: Any) -> None:
        reads, found = next(turn), _tensors(result)
        for position in reads.outputs:
            read(found[position].detach())
        for position in reads.grad_outputs:
            _node(found[position]).register_prehook(_reader_before(found[position].output_nr, read))
        for (position, *way), edge in reads.grad_inputs:
            node = _node(found[position])
            for index in way:
                following = node.next_functions[index][0]
                assert following is not None
                node = following
            node.register_hook(_reader_after(edge, read))

    return on_exit


def _reader_before(position: int, read: Read) -> Callable[[Any], None]:
    def before(grad_outputs: Any) -> None:
        read(grad_outputs[position])

    return before


def _reader_after(position: int, read: Read) -> Callable[[Any, Any], None]:
    def after(grad_inputs: Any, grad_outputs: Any) -> None:
        read(grad_inputs[position])

    return after


class _Planner:
    """Sees every boundary of one step and notes where each tensor is met first."""

    def __init__(self) -> None:
        self._calls: Plan = {}
        self._entered: list[tuple[Reads, set[tuple[Any, int]]]] = []
        self._seen: dict[tuple[int, int, int], Tensor] = {}

    def plan(self, training: Training) -> Plan:
        """Train for one step and return what to read in the ones that follow."""
        with ExitStack() as undo:
            for module in training.model.modules():
                undo.callback(module.register_forward_pre_hook(self._enter).remove)
                undo.callback(module.register_forward_hook(self._leave).remove)
            training.step()
        self._seen.clear()
        return self._calls

    def _is_new(self, tensor: Tensor | None) -> bool:
        """Whether these values are met for the first time; a tensor, a view of all of it and an alias have the same."""
        if tensor is None or not tensor.is_floating_point() or not tensor.numel():
            return False
        key = (tensor.data_ptr(), tensor.numel(), tensor._version)
        new = key not in self._seen
        self._seen.setdefault(key, tensor.detach())  # held, or its memory would be given to others
        return new

    def _enter(self, module: nn.Module, args: Any) -> None:
        found = _tensors(args)
        reads = Reads(inputs=[position for position, tensor in enumerate(found) if self._is_new(tensor)])
        self._calls.setdefault(module, []).append(reads)
        self._entered.append((reads, {_edge(tensor) for tensor in found if tensor.requires_grad}))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        reads, edges = self._entered.pop()
        visited: set[Node] = set()
        for position, tensor in enumerate(_tensors(result)):
            if self._is_new(tensor):
                reads.outputs.append(position)
            if tensor.grad_fn is None or _edge(tensor) in edges:
                continue
            tensor.grad_fn.register_prehook(self._noter_before(reads.grad_outputs, position, tensor.output_nr))
            self._follow(tensor.grad_fn, (position,), edges, visited, reads)

    def _follow(
        self, start: Node, way: tuple[int, ...], edges: set[tuple[Any, int]], visited: set[Node], reads: Reads
    ) -> None:
        """Watch the edges between ``start`` and the inputs of the call that lead to the latter."""
        ahead = [(start, way)]
        while ahead:
            node, way = ahead.pop()
            if node in visited:
                continue
            visited.add(node)
            for index, (following, number) in enumerate(node.next_functions):
                if (following, number) in edges:
                    node.register_hook(self._noter_after(reads.grad_inputs, way, index))
                elif following is not None:
                    ahead.append((following, (*way, index)))

    def _noter_before(self, notes: list[int], position: int, number: int) -> Callable[[Any], None]:
        def before(grad_outputs: Any) -> None:
            if self._is_new(grad_outputs[number]):
                notes.append(position)

        return before

    def _noter_after(
        self, notes: list[tuple[tuple[int, ...], int]], way: tuple[int, ...], index: int
    ) -> Callable[[Any, Any], None]:
        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            if self._is_new(grad_inputs[index]):
                notes.append((way, index))

        return after


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """Return the edge of the graph on which a tensor's gradient arrives."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    return tensor.view_as(tensor).grad_fn.next_functions[0]  # type: ignore[union-attr]


def _node(tensor: Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors in nested tuples and lists, in order."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(tensor for item in value for tensor in _tensors(item))
    return ()
