"""What a replay must not do: communicate with other ranks, and write into memory from before the replay.

Both are refused before the operation runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrace.capture.operations.dispatch import has_own_dispatch, redispatch
from gradtrace.capture.operations.frames import user_lines
from gradtrace.capture.operations.schemas import Named, Traits, tensors_of, traits_of
from gradtrace.trace.sent import let_pass

_COMMUNICATION = ("c10d", "symm_mem", "_dtensor")


class Refused(Exception):
    """An operation that a replay must not run; the message is the reason in words."""


class Communicates(Refused):
    """An operation that needs the other ranks."""


class WritesOutside(Refused):
    """An operation that would write into memory from before the replay."""


def storage_of(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's memory while it lives; None where it has none of its own."""
    try:
        number: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError) as error:
        let_pass(error)
        return None
    return number


class Memory:
    """The memory that a replay may write into: what is given, and what the replay itself has made.

    ``refusal`` is what was refused, if anything: the user's code may have swallowed the exception.
    """

    def __init__(self, allowed: Iterable[Tensor] = ()) -> None:
        self.refusal: Refused | None = None
        self._allowed = list(allowed)
        self._ours = {storage_of(tensor) for tensor in self._allowed} | {None}

    def made(self, results: Iterable[Tensor], operands: Iterable[Tensor]) -> None:
        """Note what an operation has made; what lies in an operand's memory is none of it."""
        before = {storage_of(operand) for operand in operands}
        self._ours.update(number for result in results if (number := storage_of(result)) not in before)

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that Python has just made without an operation; not one that shows memory of numpy's."""
        if tensor.untyped_storage().resizable():
            self._ours.add(storage_of(tensor))

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory may be written into."""
        return storage_of(tensor) in self._ours

    def refuse(self, refusal: Refused) -> Refused:
        """Keep the first refusal; return this one."""
        self.refusal = self.refusal or refusal
        return refusal


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before an operation that a replay must not run.

    ``base`` is the code of the function that runs the replay: frames outside of it are none of the user's.
    ``part`` says in the refusal what is running: the forward or the backward.

    Raises (from any operation while it is active):
        Communicates, WritesOutside: see there.
    """

    supports_higher_order_operators = True

    def __init__(self, memory: Memory, base: CodeType | None = None, *, part: str = "forward") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.base = base
        self.part = part

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if has_own_dispatch(types):
            return NotImplemented  # the parts that a subclass is made of come by here
        traits = traits_of(func)
        kwargs = kwargs or {}
        self.check(traits, args, kwargs)
        operands = traits.operands(args, kwargs)
        result = self.run(func, traits, operands, args, kwargs)
        self.memory.made(tensors_of(result), (value for _, value in operands if isinstance(value, Tensor)))
        return result

    def run(
        self, func: Any, traits: Traits, operands: list[Named], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operation."""
        return redispatch(func, args, kwargs)

    def check(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the operation must not run."""
        if any(word in traits.namespace for word in _COMMUNICATION):
            raise self.memory.refuse(Communicates(f"the {self.part} communicates ({traits.name}{self._place()})"))
        if traits.constant:
            self.memory.add(args[0])
        for name, tensor in traits.written(args, kwargs) + traits.silently_written(args, kwargs):
            if isinstance(tensor, Tensor) and not self.memory.has(tensor):
                words = f"an operation writes into memory from before the replay: {traits.name}, {name}{self._place()}"
                raise self.memory.refuse(WritesOutside(words))

    def _place(self) -> str:
        lines = user_lines(self.base)
        return f", {os.path.basename(lines[-1].file)}:{lines[-1].line}" if lines else ""
