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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gradtrace.capture import interception
from gradtrace.capture.coverage import in_words, listed, unseen_below
from gradtrace.capture.interception import Call, Observer
from gradtrace.capture.names import ModuleEntry, is_wrapper, unwrapped
from gradtrace.capture.patching import Patch

NOTE = (
    "torch.compile ran eagerly while recording, since calls inside compiled regions cannot be seen; "
    "compiled code draws other random numbers (dropout)"
)

_compile = Patch(torch, "compile")


def taken_for(module: nn.Module) -> nn.Module:
    """Return the module that a call of ``module`` is a call of: of what ``torch.compile`` has made, what it wraps."""
    return unwrapped(module) if type(module).__name__ == "OptimizedModule" and is_wrapper(module) else module


class Compilation(Protocol):
    """What a recording does about ``torch.compile``."""

    def shield(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one that is never compiled itself."""

    def observer(self, observer: Observer) -> Observer:
        """Return what is to watch module calls in the place of ``observer``."""

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

    def observer(self, observer: Observer) -> Observer:
        """Return the observer itself: all calls run."""
        return observer

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
        wrapped = any(entry.info.type == "OptimizedModule" for entry in all_modules)
        return NOTE if self._used or compiled or wrapped else None

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
        import torch._dynamo  # noqa: F401

        self._functions: dict[str, None] = {}

    def shield(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one that is not compiled, nor anything that it calls."""
        shielded: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return shielded

    def observer(self, observer: Observer) -> Observer:
        """Return what watches only calls that run, and is not compiled itself."""
        return _UnlessCompiling(observer)

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
        count, names = unseen_below((entry.name for entry in compiled), all_modules)
        said = []
        if count:
            said.append(f"{in_words(count)} ran inside of compiled regions and cannot be seen: below {names}")
        if self._functions:
            said.append(f"what compiled functions call cannot be seen: {listed(list(self._functions))}")
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
    """Takes gradtrace's ``nn.Module.__call__`` away while torch compiles, for as long as somebody records."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[object] = []
        self._away = contextlib.ExitStack()

    def begin(self, user: object) -> None:
        """Do so until ``end`` is called for ``user``."""
        from torch._dynamo.callback import callback_handler

        with self._lock:
            if not self._users:
                callback_handler.register_start_callback(self._compiling_starts)
                callback_handler.register_end_callback(self._compiling_ended)
            self._users.append(user)

    def end(self, user: object) -> None:
        """Stop when the last one leaves."""
        from torch._dynamo.callback import callback_handler

        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if self._users:
                return
            callback_handler.remove_start_callback(self._compiling_starts)
            callback_handler.remove_end_callback(self._compiling_ended)
            self._away.close()

    def _compiling_starts(self, _: object) -> None:
        self._away.enter_context(interception.aside())

    def _compiling_ended(self, _: object) -> None:
        self._away.close()


_out_of_sight = _OutOfSight()


class _UnlessCompiling:
    """Lets an observer see calls that run, and none that torch looks at to compile or to export it.

    The call itself is not compiled where Python makes it: between two graphs.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def around(self, call: Call) -> Call:
        """Return the function that stands in for ``nn.Module.__call__``."""
        from torch._dynamo.eval_frame import skip_code

        is_compiling = torch.compiler.is_compiling
        watched = self._observer.around(call)

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return call(module, *args, **kwargs)
            return watched(module, *args, **kwargs)

        skip_code(__call__.__code__)
        skip_code(watched.__code__)
        return __call__
