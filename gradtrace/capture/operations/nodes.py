"""What is seen inside of a backward pass that runs again: which autograd node made the first non-finite gradient.

Nodes are judged, never the kernels inside of them: many formulas divide by zero and repair it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._autograd import SavedTensor
from torch.utils.hooks import RemovableHandle

from gradtrace.capture.graph import LEAF_SEQUENCE
from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.operations.births import MOST, Birth, Operand
from gradtrace.capture.operations.stacks import stack_of
from gradtrace.capture.operations.values import Judge
from gradtrace.trace.sent import let_pass

ModuleOf = Callable[[int], "tuple[ModuleEntry, int] | None"]
Gradients = Sequence[Tensor | None]

_SAVED = "_saved_"
_ANOMALY = re.compile(r"Function '(?P<function>.+)' returned nan values in its (?P<output>\d+)th output\.")


class AnomalySays(NamedTuple):
    """What anomaly detection found: the node, the number of its output, the message as it stands."""

    function: str
    output: int
    message: str


def anomaly_says(error: BaseException) -> AnomalySays | None:
    """Return what anomaly detection says by raising ``error``, None where it is another error."""
    found = _ANOMALY.search(str(error))
    return AnomalySays(found["function"], int(found["output"]), found[0]) if found else None


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield each autograd node that a backward pass from ``roots`` may run, save those that accumulate."""
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in seen or node._sequence_nr() == LEAF_SEQUENCE:
            continue
        seen.add(node)
        yield node
        stack.extend(target for target, _ in node.next_functions)


class BackwardNodes:
    """Finds the births of a backward pass.

    ``module_of`` gives the module call in which the node of a sequence number was made. ``births`` are in order
    of execution, the first ``MOST`` of them; ``left_out`` counts the others.
    """

    def __init__(self, module_of: ModuleOf) -> None:
        self.births: list[Birth] = []
        self.left_out = 0
        self._module_of = module_of
        self._judge = Judge()
        self._handles: list[RemovableHandle] = []
        self._saved: dict[Any, dict[str, Tensor]] = {}
        self._watched: set[Any] = set()

    def __enter__(self) -> BackwardNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Judge every node of the graph behind ``outputs`` from now on."""
        for node in walk(tensor.grad_fn for tensor in outputs):
            if node not in self._watched:
                self._watched.add(node)
                self._handles.append(node.register_prehook(functools.partial(self._begins, node)))
                self._handles.append(node.register_hook(functools.partial(self._ends, node)))

    def remove(self) -> None:
        """Let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._saved.clear()

    def _begins(self, node: Any, _: Gradients) -> None:
        """Keep what a node has saved, which is gone when it has run."""
        self._saved[node] = dict(_saved_by(node))

    def _ends(self, node: Any, results: Gradients, arrived: Gradients) -> None:
        """Judge what a node has made of the gradients that arrived."""
        saved = self._saved.pop(node, {})
        if any(gradient is not None and self._judge.kinds(gradient) for gradient in arrived):
            return
        bad = next((i for i, g in enumerate(results) if g is not None and self._judge.kinds(g)), None)
        if bad is None:
            return
        if len(self.births) >= MOST:
            self.left_out += 1
            return
        result = results[bad]
        assert result is not None
        measure = self._judge.measure(result)
        if measure is not None:
            owner, call = self._module_of(node._sequence_nr()) or (None, None)
            operands = [*self._operands(arrived, saved)]
            lines = stack_of(node)
            self.births.append(Birth(node.name(), owner, call, "grad_input", bad, measure, operands, lines))

    def _operands(self, arrived: Gradients, saved: dict[str, Tensor]) -> Iterator[Operand]:
        for number, gradient in enumerate(arrived):
            measure = None if gradient is None else self._judge.measure(gradient)
            if measure is not None:
                yield Operand("grad_output", str(number), measure)
        for name, tensor in saved.items():
            measure = self._judge.measure(tensor)
            if measure is not None:
                yield Operand("input", f"saved.{name}", measure)


def _saved_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a node has saved, by name.

    Not those that are made again when they are asked for (checkpointing, offloading): that may be done once.
    """
    if hasattr(node, "_raw_saved_tensors"):  # a custom Function
        if all(_is_plain(raw) for raw in node._raw_saved_tensors):
            yield from ((str(i), tensor) for i, tensor in enumerate(node.saved_tensors) if tensor is not None)
        return
    for attribute in dir(type(node)):
        if attribute.startswith(_SAVED) and _is_plain(getattr(node, f"_raw{attribute}", None)):
            tensor = _unpacked(node, attribute)
            if tensor is not None:
                yield attribute.removeprefix(_SAVED), tensor


def _is_plain(raw: Any) -> bool:
    return isinstance(raw, SavedTensor) and getattr(raw, "unpack_hook", None) is None


def _unpacked(node: Any, attribute: str) -> Tensor | None:
    try:
        value = getattr(node, attribute)
    except RuntimeError as error:  # changed in place since
        let_pass(error)
        return None
    return value if isinstance(value, Tensor) else None
