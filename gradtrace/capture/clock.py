"""Counts steps, micro steps and backward passes, and decides to which step the rows in flight belong.

The first optimizer that steps is the clock; a step ends when it has stepped. When another optimizer steps after
it (the generator after the discriminator), what was seen since then belongs to the step that has just ended.
Without an optimizer, or if its steps cannot be seen, an outermost forward after a backward starts a new step; without
any backward, every outermost call is a step. ``Tracer.step`` overrides all of this.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from enum import Enum, auto
from itertools import chain, starmap

from torch.optim import Optimizer

_Reference = weakref.ref[Optimizer]


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
        self.backward_in_step = False
        self.by_hand = False
        self.is_over: Callable[[Optimizer], bool] = lambda optimizer: False
        """Whether an optimizer's models are gone, so that it will never step again."""
        self.weights_changed: Callable[[], bool] = lambda: False
        """Whether a parameter has been changed since the last backward pass began."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called when a pass is about to start: the last moment to watch for gradients."""
        self._clock: _Reference | None = None
        self._others: list[_Reference] = []
        self._announced = False
        self._ticks = 0
        self._ever_others = False
        self._others_before = 0
        self._calls = 0
        self._backward_ever = False
        self._last_micro_step = 0
        self._optimizers = _OptimizerSearch()
        self._thread = threading.local()
        self._generation = 0

    @property
    def detail(self) -> str | None:
        """What tells apart the backward passes of one micro step: None for the first, then ``pass 2``."""
        return None if self.backward_pass < 2 else f"pass {self.backward_pass}"

    @property
    def moment(self) -> tuple[int, int]:
        """What is another one in every micro step, also where the numbers start again."""
        return self._generation, self.micro_step

    @property
    def has_ticked(self) -> bool:
        """Whether an optimizer has ended a step."""
        return self._ticks > 0

    @property
    def awaits_first_tick(self) -> bool:
        """Whether no optimizer has ended a step so far, and one may."""
        return self._clock is None and not self.by_hand

    @property
    def saw_no_call(self) -> bool:
        """Whether a backward pass has run in the step, and no outermost call of a module."""
        return self.backward_in_step and not self._calls

    @property
    def steps_in_backward(self) -> bool:
        """Whether an optimizer has stepped inside of a backward pass: at its end the gradients may be gone."""
        return self._optimizers.found_in_backward

    @property
    def may_belong_before(self) -> bool:
        """Whether what is seen from now on may turn out to belong to the step that has just ended."""
        return not self.by_hand and (self._ever_others or self._ticks == 1)

    @property
    def likely_step(self) -> int:
        """The step to which what is in flight most likely belongs: as many optimizers follow the clock's as before."""
        still_before = self.may_belong_before and len(self._others) < self._others_before
        return self.step - 1 if still_before else self.step

    def starts_step(self, *, evaluating: bool, goes_on: Callable[[], bool]) -> bool:
        """Whether the outermost call that is about to run starts a new step, there being no optimizer.

        ``goes_on`` tells whether the call continues a graph: such a call is part of the pass that has made it.
        """
        if self.by_hand or self._clock is not None:
            return False
        if self._backward_ever:
            starts = not evaluating and self.updated_without_optimizer()
        else:
            starts = self._calls > 0 and not self._optimizers.exist()
        return starts and not goes_on()

    def updated_without_optimizer(self) -> bool:
        """Whether a backward has run in this step and nothing but the script itself can have used it."""
        if self.by_hand or self._clock is not None or not self.backward_in_step:
            return False
        # An optimizer may step without torch's hooks: its class was given another ``step``, or calls none.
        return not self._optimizers.exist() or (not self._announced and self.weights_changed())

    def outermost_call(self, *, evaluating: bool) -> None:
        """Note that an outermost call starts: after a backward it is a new micro step."""
        self._calls += 1
        if not evaluating and getattr(self._thread, "after_backward_in", None) == self._generation:
            self._thread.after_backward_in = None
            self.micro_step += 1
            self.backward_pass = 0

    def backward_starts(self) -> None:
        """Note that a backward pass, of ``backward()`` or ``autograd.grad``, starts."""
        self.backward_pass += 1
        self.on_backward()

    def backward_ended(self, *, accumulating: bool) -> None:
        """Note the end of a pass; ``accumulating`` is true for ``backward()``."""
        if not self._backward_ever:
            self._optimizers.look_again()
        self.backward_in_step = self._backward_ever = True
        if accumulating:
            self._thread.after_backward_in = self._generation

    def optimizer_begins(self) -> None:
        """Note that an optimizer is about to step: steps are announced, and what happens in between is part of one."""
        self._announced = True

    def optimizer_stepped(self, optimizer: Optimizer, *, inside_backward: bool) -> Belongs:
        """Note that an optimizer has stepped, or was skipped; say to which step the rows in flight belong."""
        if inside_backward:
            self._optimizers.found_in_backward = True
            return Belongs.UNDECIDED
        if self.by_hand:
            return Belongs.UNDECIDED
        if self._takes_over(optimizer):
            self._clock = weakref.ref(optimizer)
        elif not self._is_clock(optimizer):
            self._others.append(weakref.ref(optimizer))
            self._ever_others = True
            return Belongs.STEP_BEFORE
        self._ticks += 1
        return Belongs.THIS_STEP

    def next_step(self, number: int | None = None) -> None:
        """Start the next step, or step ``number``."""
        self.step = self.step + 1 if number is None else number
        self._last_micro_step = self.micro_step
        self._others_before = len(self._others)
        self._others.clear()
        self._calls = 0
        self.backward_in_step = False
        self._restart_passes()

    def continue_step_before(self) -> int:
        """Count what was in flight to the step before; return by how much its micro steps move up."""
        shift = self._last_micro_step + 1
        self._last_micro_step = shift + self.micro_step
        self._calls = 0
        self.backward_in_step = False
        self._restart_passes()
        return shift

    def count_by_hand(self) -> None:
        """Let optimizers and calls no longer start steps: the user's loop counts."""
        self.by_hand = True

    def _is_clock(self, optimizer: Optimizer) -> bool:
        return self._clock is not None and self._clock() is optimizer

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer becomes the clock: the first, or one that steps twice without the clock."""
        if self._is_clock(optimizer):
            return False
        clock = None if self._clock is None else self._clock()
        if clock is None or any(other() is optimizer for other in self._others):
            return True
        return self.is_over(clock)

    def _restart_passes(self) -> None:
        self.micro_step = self.backward_pass = 0
        self._generation += 1  # what other threads remember of their last backward is over too


def _types_of_all_objects() -> list[type]:
    """Return the type of each object that the garbage collector knows.

    One call of C code, in which no other thread runs: a tuple that one is building from a generator could not be
    finished while the list of all objects refers to it (SystemError, in the script's own code maybe).
    """
    return list(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))


class _OptimizerSearch:
    """Is this gradient accumulation, or is there nothing that will ever step?

    Answered by going through all objects of the process, so not often: an optimizer that is found stays found,
    and none is looked for again only after twice as many questions as before.
    """

    def __init__(self) -> None:
        self.found_in_backward = False
        self._found = False
        self._questions = 0
        self._next = 1

    def exist(self) -> bool:
        """Whether there is an optimizer other than those that step inside of backward."""
        if self.found_in_backward:
            return False
        self._questions += 1
        if not self._found and self._questions >= self._next:
            self._next = 2 * self._questions
            # Not isinstance: it would run the properties of lazy objects.
            self._found = any(issubclass(kind, Optimizer) for kind in _types_of_all_objects())
        return self._found

    def look_again(self) -> None:
        """Look at the next question, be it early or late."""
        self._next = self._questions
