"""torch.compile: what runs compiled cannot be seen from inside.

By default compiled functions run eagerly while something is recorded (``EagerWhileRecording``). ``KeptCompiled`` lets
them run compiled, and sees to it that torch compiles the very code that it would compile without gradtrace: while it
compiles, nothing of gradtrace is in its sight; while compiled code runs, gradtrace's own is not compiled.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gradtrace.capture import interception, patching
from gradtrace.capture.names import ModuleEntry, is_wrapper, unwrapped
from gradtrace.capture.patching import Patch

NOTE = (
    "torch.compile ran eagerly while recording, since calls inside compiled regions cannot be seen; "
    "compiled code draws other random numbers (dropout)"
)
_MOST_NAMES = 8

_compile = Patch(torch, "compile")


def taken_for(module: nn.Module) -> nn.Module:
    """Return the module that a call of ``module`` is a call of: of what ``torch.compile`` has made, what it wraps."""
    return unwrapped(module) if type(module).__name__ == "OptimizedModule" and is_wrapper(module) else module


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run eagerly what is compiled; without the compiler there is nothing that is."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Compilation(Protocol):
    """What a recording does about ``torch.compile``."""

    def shield(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one that is never compiled itself."""

    def install(self) -> None:
        """Watch ``torch.compile`` from now on."""

    def remove(self) -> None:
        """Leave torch as it was."""

    def note(self, compiled: Sequence[ModuleEntry], all_modules: Sequence[ModuleEntry]) -> str | None:
        """Say what cannot be seen or is not as without a recording; ``compiled`` are the modules that ran compiled."""


class _Stance:
    """torch's stance ``force_eager``, one for all recordings of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[object] = []
        self._context: Any = None

    def take(self, user: object) -> None:
        """Have everything run eagerly until ``user``, and all others, have left."""
        with self._lock:
            if user in self._users:
                return
            if not self._users:
                self._context = torch.compiler.set_stance("force_eager")
            self._users.append(user)

    def leave(self, user: object) -> None:
        """Put the stance of before back when the last one leaves."""
        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if not self._users:
                self._context.__exit__(None, None, None)
                self._context = None


_stance = _Stance()


class EagerWhileRecording:
    """Keeps torch's stance ``force_eager`` from the moment that something is compiled until ``remove``.

    The stance is not set before, because asking for it loads the compiler, which takes a second.
    """

    def __init__(self) -> None:
        self._used = False

    def shield(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is: nothing is compiled."""
        return function

    def install(self) -> None:
        """Watch for ``torch.compile``; a compiler that is loaded already is told at once."""
        _compile.add(self._around)
        if "torch._dynamo.eval_frame" in sys.modules:
            _stance.take(self)

    def remove(self) -> None:
        """Put back torch's own function and stance."""
        _compile.remove(self._around)
        _stance.leave(self)

    def note(self, compiled: Sequence[ModuleEntry], all_modules: Sequence[ModuleEntry]) -> str | None:
        """Say that what was to run compiled ran eagerly."""
        return NOTE if self._used or compiled else None

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._used = True
            with contextlib.suppress(RuntimeError):  # in the middle of compiling there is nothing to be done
                _stance.take(self)
            return _undisturbed(original, args, kwargs)

        return compile


class KeptCompiled:
    """Lets compiled regions run compiled, and the boundaries of those that are modules be seen.

    The compiler is loaded at once: all that gradtrace runs has to be hidden from it.
    """

    def __init__(self) -> None:
        import torch._dynamo
        from torch._dynamo import trace_rules

        _leave_alone(trace_rules)
        self._functions: dict[str, None] = {}

    def shield(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one that is not compiled, nor anything that it calls."""
        shielded: Callable[..., Any] = torch.compiler.disable(function)
        return shielded

    def install(self) -> None:
        """Be told when torch compiles something."""
        _compile.add(self._around)
        _out_of_sight.begin(self)

    def remove(self) -> None:
        """Put back torch's own function."""
        _compile.remove(self._around)
        _out_of_sight.end(self)

    def note(self, compiled: Sequence[ModuleEntry], all_modules: Sequence[ModuleEntry]) -> str | None:
        """Say which modules were not seen, since they ran inside of compiled regions."""
        names = sorted({entry.name for entry in compiled})
        outermost = [name for name in names if not any(_is_below(name, other) for other in names)]
        unseen = [
            entry
            for entry in all_modules
            if not (entry.calls or entry.transparent) and entry.info.file is not None
            and any(_is_below(entry.name, name) for name in outermost)
        ]  # fmt: skip
        said = []
        if unseen:
            below = _listed([name or "the root" for name in outermost])
            number = f"{len(unseen):,} {'module' if len(unseen) == 1 else 'modules'}"
            said.append(f"{number} ran inside of compiled regions and cannot be seen: below {below}")
        if self._functions:
            said.append(f"what compiled functions call cannot be seen: {_listed(list(self._functions))}")
        return "; ".join(said) or None

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            target = args[0] if args else kwargs.get("model")
            # A module's own method, as ``nn.Module.compile`` passes it, is a module that is seen when it is called.
            if callable(target) and not isinstance(getattr(target, "__self__", target), nn.Module):
                self._functions.setdefault(getattr(target, "__qualname__", type(target).__name__))
            return _undisturbed(original, args, kwargs)

        return compile


def _undisturbed(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let ``torch.compile`` take a module's ``__call__`` as torch has it: it binds it for good."""
    with interception.aside():
        return original(*args, **kwargs)


class _OutOfSight:
    """Takes all stand-ins of gradtrace's away while torch compiles, for as long as somebody records."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[object] = []
        self._away = contextlib.ExitStack()

    def begin(self, user: object) -> None:
        from torch._dynamo.callback import callback_handler

        with self._lock:
            if not self._users:
                callback_handler.register_start_callback(self._compiling_starts)
                callback_handler.register_end_callback(self._compiling_ended)
            self._users.append(user)

    def end(self, user: object) -> None:
        from torch._dynamo.callback import callback_handler

        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if not self._users:
                callback_handler.remove_start_callback(self._compiling_starts)
                callback_handler.remove_end_callback(self._compiling_ended)
        if not self._users:
            self._away.close()

    def _compiling_starts(self, _: object) -> None:
        self._away.enter_context(interception.aside())
        self._away.enter_context(patching.aside())

    def _compiling_ended(self, _: object) -> None:
        self._away.close()


_out_of_sight = _OutOfSight()
_left_alone: set[str] = set()


def _leave_alone(trace_rules: Any) -> None:
    """Have the compiler leave alone the functions of this package that run while it waits for something to compile."""
    package = __name__.partition(".")[0]
    if package not in _left_alone:
        _left_alone.add(package)
        trace_rules.add(package)


def _is_below(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
