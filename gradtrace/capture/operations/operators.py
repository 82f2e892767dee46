"""What is seen inside of a forward pass that runs again: which operation made the first non-finite value.

Every operation that reaches the dispatcher is judged: finite operands and a non-finite result are a birth. Where
its value then goes is followed through memory, so that views, assignments into slices and ``out=`` are no gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.operations.births import MOST, Birth, Operand
from gradtrace.capture.operations.dispatch import redispatch
from gradtrace.capture.operations.frames import user_lines
from gradtrace.capture.operations.guards import Guard, Memory, storage_of
from gradtrace.capture.operations.schemas import Named, Traits, tensors_of
from gradtrace.capture.operations.values import FINITE, NAN, Judge, Kinds, Origins, is_mask_like, kinds_of_number
from gradtrace.capture.statistics import Measure

Innermost = Callable[[], "tuple[ModuleEntry, int] | None"]


class _Read(NamedTuple):
    """An operand as it was before the operation; ``measure`` is taken early only where it is overwritten."""

    name: str
    value: Any
    kinds: Kinds
    births: frozenset[int]
    measure: Measure | None


class _Unnamed(NamedTuple):
    """A birth whose node is known as soon as the operation is over."""

    birth: Birth
    result: Tensor


class ForwardOps(Guard):  # type: ignore[no-untyped-call]
    """Finds the births of a forward pass, while it is active; refuses what a ``Guard`` refuses.

    ``innermost`` gives the innermost module call that is open. ``births`` are in order of execution, the first
    ``MOST`` of them; ``left_out`` counts the others. A birth of which ``fill`` is true only wrote a constant. An
    operation that turns such an infinity, or one from outside of the pass, into NaN is a birth of its own.
    """

    def __init__(self, memory: Memory, innermost: Innermost, base: CodeType | None = None) -> None:
        super().__init__(memory, base)
        self.births: list[Birth] = []
        self.left_out = 0
        self._innermost = innermost
        self._judge = Judge()
        self._origins = Origins(self._judge)
        self._harmless: set[int] = set()
        self._raw: dict[int, Birth] = {}
        self._unnamed: _Unnamed | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._name_last()

    def leaves(self, entry: ModuleEntry, call: int, outputs: Iterable[tuple[str, Tensor]]) -> None:
        """Note which births have reached the outputs of a module call."""
        self._name_last()
        for path, tensor in outputs:
            if self._judge.kinds(tensor):
                for number in sorted(self._origins.of(tensor) or ()):
                    if number < len(self.births):
                        self.births[number].flows_to.append((entry, call, path))

    def run(
        self, func: Any, traits: Traits, operands: list[Named], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation and judge it."""
        self._name_last()
        if traits.makes_nothing:
            return redispatch(func, args, kwargs)
        written = [tensor for _, tensor in traits.written(args, kwargs)]
        reads = [self._read(*operand, written) for operand in operands if traits.is_read(operand[0])]
        result = redispatch(func, args, kwargs)
        for tensor in written + [tensor for _, tensor in traits.silently_written(args, kwargs)]:
            self._judge.wrote(tensor)
        results = tensors_of(result)
        results += [tensor for tensor in written if not any(tensor is other for other in results)]
        for tensor in results:
            if not any(tensor is other for other in written):
                self._raw.pop(storage_of(tensor) or 0, None)
        if traits.uninitialised:
            self._keep_in_mind(traits, results)
        else:
            self._judge_results(traits, reads, results)
        return result

    # Before ---------------------------------------------------------------------------------------------------

    def _read(self, name: str, value: Any, written: list[Tensor]) -> _Read:
        if not isinstance(value, Tensor):
            return _Read(name, value, kinds_of_number(value), frozenset(), None)
        kinds = self._judge.kinds(value)
        births = self._origins.of(value) if kinds else frozenset()
        if births is None:
            births = self._births_of_raw(value)
        is_overwritten = any(storage_of(value) == storage_of(tensor) for tensor in written)
        return _Read(name, value, kinds, births, self._judge.measure(value) if is_overwritten else None)

    def _births_of_raw(self, tensor: Tensor) -> frozenset[int]:
        """Return a birth for values that nothing has ever written: memory as it was found."""
        birth = self._raw.pop(storage_of(tensor) or 0, None)
        measure = None if birth is None else self._judge.measure(tensor)
        if birth is None or measure is None:
            return frozenset()
        birth.result = measure
        births = frozenset([self._add(birth)])
        self._origins.add(tensor, births)
        return births

    def _keep_in_mind(self, traits: Traits, results: list[Tensor]) -> None:
        for tensor in results:
            number = storage_of(tensor)
            measure = self._judge.measure(tensor)
            if number is not None and measure is not None:
                self._raw[number] = self._birth(traits, [], 0, measure)

    # After ----------------------------------------------------------------------------------------------------

    def _judge_results(self, traits: Traits, reads: list[_Read], results: list[Tensor]) -> None:
        bad = [read for read in reads if read.kinds and isinstance(read.value, Tensor)]
        births = frozenset[int]().union(*(read.births for read in bad))
        is_new = False
        for index, tensor in enumerate(results):
            kinds = self._judge.kinds(tensor)
            if not kinds:
                self._origins.settle(tensor)
                continue
            fill = None if is_new else self._fill(traits, reads, bad, kinds)
            measure = None if fill is None else self._judge.measure(tensor)
            if fill is not None and measure is not None:
                is_new = True
                birth = self._birth(traits, reads, index, measure, fill=fill)
                births |= {self._add(birth)}
                if has_own_node(tensor):
                    self._unnamed = _Unnamed(birth, tensor)
            self._origins.add(tensor, births)

    def _fill(self, traits: Traits, reads: list[_Read], bad: list[_Read], kinds: Kinds) -> bool | None:
        """Return whether a result is a birth that fills in a constant (True), another birth, or none (None)."""
        if not bad:
            given = FINITE.union(*(read.kinds for read in reads))
            return bool(given) and kinds <= given
        if traits.constant:
            return True
        if any(read.births - self._harmless for read in bad):
            return None
        before = FINITE.union(*(read.kinds for read in bad))
        if NAN in kinds and NAN not in before:
            return False
        return True if traits.fills and all(read.value.dim() == 0 for read in bad) else None

    def _birth(self, traits: Traits, reads: list[_Read], index: int, result: Measure, *, fill: bool = False) -> Birth:
        owner, call = self._innermost() or (None, None)
        measured = [(read, read.measure or self._judge.measure(read.value)) for read in reads]
        operands = [Operand("input", read.name, measure) for read, measure in measured if measure is not None]
        lines = user_lines(self.base)
        return Birth(traits.name, owner, call, "output", index, result, operands, lines, fill=fill)

    def _add(self, birth: Birth) -> int:
        """Return the number of a birth; those beyond the limit have one too."""
        number = len(self.births) + self.left_out
        if birth.fill or is_mask_like(birth.result):
            self._harmless.add(number)
        if len(self.births) < MOST:
            self.births.append(birth)
        else:
            self.left_out += 1
        return number

    def _name_last(self) -> None:
        """Give the last birth the name of its autograd node."""
        last, self._unnamed = self._unnamed, None
        if last is not None:
            node = last.result.grad_fn
            if node is not None:
                last.birth.op = node.name()


def has_own_node(result: Tensor) -> bool:
    """Whether the node that ``result`` is about to get is that of the operation that has just made it.

    Inside of a custom Function's forward it is the Function's. Of a view that is written into it is that of
    the view.
    """
    return torch.is_grad_enabled() and not result._is_view()
