"""Checks of the loss code's nodes during the backward pass itself: finite gradients in, a non-finite one out.

The hooks hold no nodes and no gradients, and are gone when the pass is over. On an accelerator nothing waits:
numbers are collected and judged after ``Statistics.resolve``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.capture.loss.region import bare_name
from gradtrace.capture.loss.values import operation, saved_values
from gradtrace.capture.operations import births
from gradtrace.capture.operations.births import Birth, Operand
from gradtrace.capture.operations.stacks import Notes, lines_of, notes_of
from gradtrace.capture.session import Session, quiet
from gradtrace.capture.statistics import Measure, Unmeasurable
from gradtrace.trace.sent import let_pass

_MOVES = "View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Permute|Transpose|T|Clone|Select|Slice|Stack|Cat"
_HARMLESS = frozenset(["Neg", "Sum", "Mean", *_MOVES.split("|")])
"""Operations whose derivative is 1 or less, and is added up nowhere: no finite gradient becomes too large there."""

Gradients = Sequence[Tensor | None]


class _Node(NamedTuple):
    """What a hook knows of its node. ``leaves`` says for each result whether it leaves the loss code."""

    op: str
    notes: Notes
    leaves: tuple[bool, ...]


class _Passage(NamedTuple):
    """One node's run: the numbers of its results and of what it was given, and what else it read."""

    node: _Node
    results: list[tuple[int, Measure]]
    given: list[tuple[int, Measure]]
    kept: list[tuple[str, Measure]]


class LossChecks:
    """Watches nodes during one backward pass."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hook = session.guarded(self._passed)
        self._handles: list[Any] = []
        self._passages: list[_Passage] = []

    def watch(self, nodes: Sequence[Any]) -> None:
        """Check ``nodes`` during the pass that is about to start."""
        region = set(nodes)
        for node in nodes:
            if operation(node) in _HARMLESS:
                continue
            leaves = tuple(step[0] not in region for step in node.next_functions)
            facts = _Node(bare_name(node), notes_of(node), leaves)
            self._handles.append(node.register_hook(functools.partial(self._hook, facts)))

    def pass_ended(self) -> None:
        """Take the hooks away: another pass through the same graph is watched anew."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def births(self) -> list[Birth]:
        """Return the births of the passes so far, in order of execution, and forget them.

        To be called once the numbers are there (``Statistics.resolve``).
        """
        passages, self._passages = self._passages, []
        found = [birth for passage in passages for birth in _births(passage)]
        return found[: births.MOST]

    def drop(self) -> None:
        """Forget what was collected."""
        self.pass_ended()
        self._passages = []

    # What the hooks call ------------------------------------------------------------------------------------

    def _passed(self, node: _Node, results: Gradients, given: Gradients) -> None:
        if not self._session.capturing:
            return
        with quiet():
            seen = self._worth_a_look(node, results)
            came = self._measures(given) if seen else None
            if came is None:
                return
            if any(measure.pending for _, measure in (*seen, *came)):
                self._passages.append(_Passage(node, seen, came, []))
            elif len(self._passages) < births.MOST and all(measure.finite for _, measure in came):
                self._passages.append(_Passage(node, seen, came, list(self._kept())))

    def _worth_a_look(self, node: _Node, results: Gradients) -> list[tuple[int, Measure]]:
        """Measure the results that are bad, or may turn out to be when the numbers are there."""
        seen = []
        for index, result in enumerate(results):
            if result is None or not (node.leaves[index] or self._is_suspicious(result)):
                continue
            # What leaves the loss code arrives at a boundary: there the measure is found again.
            measure = self._measure(result)
            if measure is not None and (measure.pending or not measure.finite):
                seen.append((index, measure))
        return seen

    def _is_suspicious(self, gradient: Tensor) -> bool:
        return self._session.statistics.waits(gradient) or self._session.is_finite(gradient) is False

    def _measures(self, gradients: Gradients) -> list[tuple[int, Measure]] | None:
        measures = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            measure = self._measure(gradient)
            if measure is None:
                return None
            measures.append((index, measure))
        return measures

    def _kept(self) -> Iterator[tuple[str, Measure]]:
        """Yield the numbers of what the node that is running has kept of the forward pass."""
        for name, value in saved_values(torch._C._current_autograd_node()):
            if isinstance(value, Tensor) and value.dtype is not torch.bool:
                measure = self._measure(value)
                if measure is not None:
                    yield name, measure

    def _measure(self, tensor: Tensor) -> Measure | None:
        try:
            return self._session.statistics.measure_once(tensor)
        except (Unmeasurable, RuntimeError, TypeError) as error:
            let_pass(error)
            self._session.unmeasured["gradient in the loss code"] += 1
            return None


def _births(passage: _Passage) -> Iterator[Birth]:
    if not all(measure.finite for _, measure in passage.given):
        return
    operands = [Operand("grad_output", str(index), measure) for index, measure in passage.given]
    operands += [Operand("input", f"saved.{name}", measure) for name, measure in passage.kept]
    for index, measure in passage.results:
        if not measure.finite:
            traceback = lines_of(passage.node.notes)
            yield Birth(passage.node.op, None, None, "grad_input", index, measure, operands, traceback)
