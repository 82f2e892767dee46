"""Counts steps, micro steps and backward passes, and decides to which step the rows in flight belong.

The first optimizer that steps is the clock; a step ends when it has stepped. When another optimizer steps after
it (the generator after the discriminator), what was seen since then belongs to the step that has just ended.
Without an optimizer, an outermost forward after a backward starts a new step; without any backward, every
outermost call is a step. ``Tracer.step`` overrides all of this.
"""

from __future__ import annotations

import gc
import threading
from enum import Enum, auto

from torch.optim import Optimizer


class Belongs(Enum):
    """To which step the rows in flight belong when an optimizer has stepped."""

    THIS_STEP = auto()
    STEP_BEFORE = auto()
    UNDECIDED = auto()


class Clock:
    """The numbers that every row carries."""

    def __init__(self, first_step: int) -> None:
        self.step = first_step
        self.micro_step = 0
        self.backward_pass = 0
        self._manual = False
        self._clock: int | None = None
        self._others: set[int] = set()
        self._calls = 0
        self.backward_in_step = False
        self._backward_ever = False
        self._optimizer_exists: bool | None = None
        self._optimizer_in_backward = False
        self._last_micro_step = 0
        self._thread = threading.local()

    @property
    def detail(self) -> str | None:
        """What tells apart the backward passes of one micro step: None for the first, then ``pass 2``."""
        return None if self.backward_pass < 2 else f"pass {self.backward_pass}"

    def starts_step(self, *, evaluating: bool) -> bool:
        """Whether the outermost call that is about to run starts a new step, there being no optimizer."""
        if self._manual or self._clock is not None:
            return False
        if self._backward_ever:
            return not evaluating and self.backward_in_step and not self._has_optimizer()
        return self._calls > 0 and not self._has_optimizer()

    def outermost_call(self, *, evaluating: bool) -> None:
        """Note that an outermost call starts: after a backward it is a new micro step."""
        self._calls += 1
        if not evaluating and getattr(self._thread, "after_backward", False):
            self._thread.after_backward = False
            self.micro_step += 1
            self.backward_pass = 0

    def backward_starts(self) -> None:
        """Note that a backward pass, of ``backward()`` or ``autograd.grad``, starts."""
        self.backward_pass += 1

    def backward_ended(self, *, accumulating: bool) -> None:
        """Note the end of a pass; ``accumulating`` is true for ``backward()``."""
        self.backward_in_step = self._backward_ever = True
        if accumulating:
            self._thread.after_backward = True

    def optimizer_stepped(self, optimizer: Optimizer, *, inside_backward: bool) -> Belongs:
        """Note that an optimizer has stepped, or was skipped; say to which step the rows in flight belong."""
        if inside_backward:
            self._optimizer_in_backward = True
            return Belongs.UNDECIDED
        if self._manual:
            return Belongs.UNDECIDED
        key = id(optimizer)
        if self._clock is None or key in self._others:
            self._clock = key
        if key == self._clock:
            return Belongs.THIS_STEP
        self._others.add(key)
        return Belongs.STEP_BEFORE

    def next_step(self, number: int | None = None) -> None:
        """Start the next step, or step ``number``."""
        self.step = self.step + 1 if number is None else number
        self._last_micro_step = self.micro_step
        self._others.clear()
        self._calls = 0
        self.backward_in_step = False
        self._restart_passes()

    def continue_step_before(self) -> int:
        """Count what was in flight to the step before; return by how much its micro steps move up."""
        shift = self._last_micro_step + 1
        self._last_micro_step = shift + self.micro_step
        self._restart_passes()
        return shift

    def count_by_hand(self) -> None:
        """Let optimizers and calls no longer start steps: the user's loop counts."""
        self._manual = True

    def _restart_passes(self) -> None:
        self.micro_step = self.backward_pass = 0
        self._thread.after_backward = False

    def _has_optimizer(self) -> bool:
        if self._optimizer_in_backward:
            return False
        if self._optimizer_exists is None:
            # Once a run: is this gradient accumulation, or is there nothing that will ever step?
            self._optimizer_exists = any(issubclass(type(o), Optimizer) for o in gc.get_objects())
        return self._optimizer_exists
