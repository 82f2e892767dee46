"""What all parts of a recording in progress share, and the two rules they all follow.

Nothing that gradtrace does may be seen by the training (``quiet``), and no error of gradtrace may reach it
(``guarded``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace.capture.clock import Clock
from gradtrace.capture.measures import Measure
from gradtrace.capture.names import Names
from gradtrace.capture.readable import Unmeasurable
from gradtrace.capture.rows import RowBuffer
from gradtrace.capture.schedule import Captures
from gradtrace.capture.sites import Named, Site
from gradtrace.capture.statistics import Statistics
from gradtrace.capture.subclasses import met, without_their_own_ways
from gradtrace.capture.voice import warn
from gradtrace.errors import CannotWriteError, NonFiniteError
from gradtrace.trace.sent import let_pass, sent

P = ParamSpec("P")
R = TypeVar("R")

CANNOT_MEASURE = (Unmeasurable, RuntimeError, TypeError, NotImplementedError)
"""What measuring a tensor may raise."""

_grad_mode = torch.is_grad_enabled
_set_grad_mode = torch._C._set_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


sessions_in_progress: weakref.WeakSet[Session] = weakref.WeakSet()


def _end_in_child() -> None:
    """A forked child (a DataLoader's worker) records nothing; locks may be held there by nobody: touch none."""
    for session in list(sessions_in_progress):
        session.active = session.capturing = False


os.register_at_fork(after_in_child=_end_in_child)


class Session:
    """The state of one recording.

    ``capturing`` says whether the step in flight is captured in full; ``active`` turns false for good when the
    recording ends, after which hooks that are still in some graph do nothing.
    """

    def __init__(
        self,
        names: Names,
        schedule: Captures,
        clock: Clock,
        rows: RowBuffer,
        statistics: Statistics,
        shield: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        self.active = True
        self.names = names
        self.schedule = schedule
        self.clock = clock
        self.rows = rows
        self.statistics = statistics
        self.unmeasured: Counter[str] = Counter()
        self.failure: str | None = None
        self.cannot_write = False
        """Whether it was the place of the recording that failed, which has been said then."""
        self.on_failure: Callable[[], None] = lambda: None
        self.capturing = schedule.captures(clock.step)
        self.shield = shield
        """Makes of a function of gradtrace's one that torch does not compile."""

    def record(
        self,
        phase: str,
        owner: Named | None,
        tensor: str,
        path: str,
        value: Tensor,
        *,
        call: int | None = None,
        micro_step: int | None = None,
        detail: str | None = None,
        once: bool = True,
        arrived: Sequence[Measure] | None = None,
    ) -> Measure | None:
        """Measure ``value``, add its row and return the measure. To be called in ``quiet``.

        A tensor that cannot be measured is counted, and None returned.

        ``once`` reuses the measure of a tensor that has been seen and not changed since. For ``arrived`` see
        ``Row``.
        """
        try:
            measure = self.statistics.measure_once(value) if once else self.statistics.measure(value)
        except CANNOT_MEASURE as error:
            self.cannot_measure(error)
            return None
        micro = self.clock.micro_step if micro_step is None else micro_step
        self.rows.append(micro, phase, owner, call, tensor, path, measure, detail, arrived)
        return measure

    def see(
        self,
        site: Site,
        value: Tensor,
        call: int | None,
        micro_step: int,
        arrived: Sequence[Measure] | None = None,
    ) -> Measure | None:
        """Measure ``value``, add its row and return the measure, like ``record``; the short way for what comes often.

        The measure of a tensor that has been seen and not changed since is used again.
        """
        try:
            measure = self.statistics.measure_once(value)
        except CANNOT_MEASURE as error:
            self.cannot_measure(error)
            return None
        self.rows.add((site, micro_step, call, measure, arrived))
        return measure

    def see_anew(self, site: Site, value: Tensor) -> Measure | None:
        """Like ``see``, in the present micro step and outside of any call, but never from memory.

        An update through ``.data`` leaves no trace in a tensor's version.
        """
        try:
            measure = self.statistics.measure(value)
        except CANNOT_MEASURE as error:
            self.cannot_measure(error)
            return None
        self.rows.add((site, self.clock.micro_step, None, measure, None))
        return measure

    def is_finite(self, value: Tensor) -> bool | None:
        """Whether no element is NaN or infinite; None, and counted, where that cannot be said."""
        try:
            return self.statistics.all_finite(value)
        except CANNOT_MEASURE as error:
            self.cannot_measure(error)
            return None

    def surely_finite(self, values: Sequence[Tensor]) -> bool:
        """Whether one look is enough to see that all elements of all tensors are finite. False says nothing."""
        try:
            return self.statistics.surely_finite(values)
        except CANNOT_MEASURE as error:
            let_pass(error)
            return False

    def cannot_measure(self, error: Exception) -> None:
        """Count a tensor that could not be measured.

        Raises:
            Exception: the error is one of the script's own, of a signal's handler maybe.
        """
        let_pass(error)
        reason = str(error) if isinstance(error, Unmeasurable) else f"{type(error).__name__} while measuring"
        self.unmeasured[reason] += 1

    def count_unseen(self) -> None:
        """Count a call that cannot be observed, unless it is no part of the training: a look at the code."""
        if in_cuda_graph():
            self.unmeasured[IN_CUDA_GRAPH] += 1
        elif in_transform() and not _is_compiling():
            self.unmeasured[IN_TRANSFORM] += 1

    def fail(self, error: BaseException) -> None:
        """Take the capture down, say so once, and let the training go on."""
        if not self.active:
            return
        self.active = self.capturing = False
        if isinstance(error, CannotWriteError):
            self.cannot_write = True
            self.failure, words = error.reason, str(error)
        else:
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            words = f"recording stopped by an error of gradtrace's own ({self.failure}); the training goes on"
        with contextlib.suppress(Exception):
            self.on_failure()
        warn(words)

    def caught(self, error: BaseException, grad_mode: bool) -> None:
        """Deal with an error that has come up in gradtrace's code, which was entered with this grad mode.

        Raises:
            NonFiniteError: the fuse, which was asked for.
            BaseException: what a signal's handler of the script has raised in the middle of it, and the like.
        """
        if isinstance(error, NonFiniteError):
            raise error
        if sent(error) is None:
            self.fail(error)
            return
        _set_grad_mode(grad_mode)  # a handler runs before an ``__exit__`` does anything, too
        let_pass(error)

    def guarded(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return ``function`` with its errors turned into ``fail``; it does nothing once the session ended."""

        function = self.shield(function)

        # Without functools.wraps, which costs more than the rest: this runs for every hook of every call.
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if self.active:
                grad_mode = _grad_mode()
                try:
                    if _cuda_in_use() and _is_capturing():
                        self.unmeasured[IN_CUDA_GRAPH] += 1
                        return None
                    if met.any:
                        with without_their_own_ways():
                            return function(*args, **kwargs)
                    return function(*args, **kwargs)
                except BaseException as error:
                    self.caught(error, grad_mode)
            return None

        return call


class quiet:
    """Context in which tensors are measured: no graph, no user modes, nothing that the training could see."""

    __slots__ = ("_undo",)

    def __enter__(self) -> None:
        self._undo = be_quiet()

    def __exit__(self, *error: object) -> None:
        if self._undo is not None:
            self._undo()


def be_quiet() -> Callable[[], object] | None:
    """Do what ``quiet`` does until the function that is returned is called; None if there is nothing to undo.

    For what happens hundreds of times a step. To be followed by try and finally.
    """
    if met.any or _dispatch_modes() or _function_modes():
        return _without_modes_and_grad()
    if _grad_mode():
        try:
            _set_grad_mode(False)
        except BaseException:  # a signal's handler has raised: nobody has anything yet to undo it with
            _set_grad_mode(True)
            raise
        return _grad_mode_on
    return None


_grad_mode_on = functools.partial(_set_grad_mode, True)


def _without_modes_and_grad() -> Callable[[], object]:
    undo = contextlib.ExitStack()
    undo.enter_context(_without_modes())
    undo.enter_context(torch.no_grad())
    return undo.close


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


IN_TRANSFORM = "module call inside of vmap, torch.func.grad or the like"
IN_CUDA_GRAPH = "call or hook while a CUDA graph was captured; its replays cannot be seen either"

_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_functorch_level = torch._C._functorch.peek_interpreter_stack


def cannot_observe() -> bool:
    """Whether a call runs where values do not exist: traced, compiled, or inside of a functorch transform.

    Or where looking at them would become part of what is run again and again: while a CUDA graph is captured.
    """
    # What in_transform asks, asked here: a call more for each call of a module would be felt.
    if _functorch_level() is not None or _tracing_state() is not None or _is_compiling():
        return True
    return _cuda_in_use() and _is_capturing()


def in_transform() -> bool:
    """Whether this thread is inside of a transform of torch.func: tensors are wrapped there."""
    return _functorch_level() is not None


# Both are asked at every call and hook, so no function of ours stands before them; bool() is False.
_cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized if torch.backends.cuda.is_built() else bool  # type: ignore[no-untyped-call]
_is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def in_cuda_graph() -> bool:
    """Whether what this thread does becomes part of a CUDA graph, instead of being run."""
    # Where there is no device, or none in use yet, the question itself is an error.
    return _cuda_in_use() and _is_capturing()
