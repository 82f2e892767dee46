"""Runs a script, a directory, a zip file or a module as ``python`` would run it.

The script gets a ``__main__`` of its own, its ``sys.argv`` and ``sys.path[0]``. Whatever ends it then goes
Python's own way: exceptions and ``SystemExit`` leave ``run_script`` and reach the interpreter, which prints
them, waits for threads, runs the script's exit handlers and chooses the exit code. Knows nothing of
recording: the caller is told how the script ended, last of all.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import cast

from gradtrace.capture.tracebacks import strip_own_frames
from gradtrace.errors import CaptureError

_DEADLY_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_replaced_mains: list[ModuleType] = []
"""The ``__main__`` that made way: CPython tidies it up once more when all is over, and holds no reference."""


@dataclass(frozen=True)
class Script:
    """What to run: the path of a file, or of a directory or zip file with a ``__main__.py`` in it.

    With ``is_module`` the target is a module's name, as after ``python -m``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def check_script(script: Script) -> None:
    """Say in one line what ``python`` would say later: that there is nothing to run.

    Raises:
        CaptureError: the file does not exist or cannot be read, or there is no such top-level module.
    """
    if script.is_module:
        name = script.target.partition(".")[0]
        if name and not _exists(name):
            raise CaptureError(f"no such module: {script.target}")
    elif not os.path.exists(script.target):
        raise CaptureError(f"no such script: {script.target}{_module_hint(script.target)}")
    elif not os.access(script.target, os.R_OK):
        raise CaptureError(f"cannot read {script.target}: permission denied")


def run_script(script: Script, *, on_end: Callable[[str], None], on_signal: Callable[[str], None]) -> None:
    """Run the script to its end; to be called once, from the main thread.

    ``on_end`` is called with ``completed``, ``exit N``, ``exception NAME`` or ``signal SIGINT`` when the
    interpreter is about to exit: after the script's threads and exit handlers, before anything is torn down.
    ``on_signal`` is called with ``signal NAME`` when SIGTERM or SIGHUP is about to kill the process, and has
    to be quick; without a handler of the script's own the process dies of that signal afterwards. Like every
    signal handler in Python it waits for the main thread to come back from C code. Neither is called in a
    forked child.

    Raises:
        SystemExit: the script's.
        BaseException: whatever the script did not catch. It must reach the interpreter: then it is shown as
            without gradtrace.
    """
    ending = _Ending(on_end, on_signal)
    ending.watch()
    _strip_thread_tracebacks()
    try:
        _prepare(script)()
    except SystemExit as exit_:
        ending.how = _exit_in_words(exit_.code)
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        ending.how = "signal SIGINT" if interrupted else f"exception {type(error).__name__}"
        _strip_last_traceback()
        raise


def _exit_in_words(code: object) -> str:
    if code is None:
        code = 0
    number = code if isinstance(code, int) else 1  # a text is printed, and the exit code is 1
    return f"exit {int(number)}" if number else "completed"


# --- running ---------------------------------------------------------------------------------------------


def _prepare(script: Script) -> Callable[[], None]:
    """Set up ``__main__``, ``sys.argv`` and ``sys.path``; return what runs the script."""
    main = _new_main()
    if script.is_module:
        sys.argv = ["-m", *script.arguments]  # runpy puts the module's file there
        _set_first_path(os.getcwd())
        return lambda: _run_module(script.target, alter_argv=True)
    sys.argv = [script.target, *script.arguments]
    path = os.path.join(os.getcwd(), script.target)
    if pkgutil.get_importer(path) is not None:
        # A directory or zip file is put on the path even when Python is told to add nothing to it (-P).
        sys.path[: 0 if _path_is_safe() else 1] = [path]
        return lambda: _run_module("__main__", alter_argv=False)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    return lambda: _run_file(path, main)


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # from then on annotations are lazy, and a dictionary would hide them
        main.__annotations__ = {}
    _replaced_mains.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's second name for it: workers pickle by it
        sys.modules["__mp_main__"] = main
    return main


def _path_is_safe() -> bool:
    """Whether Python was told (-P, -I) to put no directory of its own at the head of ``sys.path``."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _set_first_path(directory: str) -> None:
    if not _path_is_safe():
        sys.path[0] = directory


def _run_module(name: str, *, alter_argv: bool) -> None:
    # What ``python -m`` itself calls; its frames and its words are the ones that people know.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run_file(path: str, main: ModuleType) -> None:
    if path.endswith(".pyc"):
        bytecode = importlib.machinery.SourcelessFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=bytecode)
        code = cast(CodeType, bytecode.get_code("__main__"))
    else:
        source = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=source)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)
    for name in ("__file__", "__cached__"):  # so does Python: threads and exit handlers do not see them
        main.__dict__.pop(name, None)


def _module_hint(target: str) -> str:
    is_module = not target.endswith(".py") and _exists(target.partition(".")[0])
    return f"; to run a module: -m {target}" if is_module else ""


def _exists(module: str) -> bool:
    """Whether there is such a top-level module, seen from the working directory."""
    if module in sys.builtin_module_names:
        return True
    path = sys.path if _path_is_safe() else [os.getcwd(), *sys.path[1:]]
    return bool(module) and importlib.machinery.PathFinder.find_spec(module, path) is not None


# --- ending ----------------------------------------------------------------------------------------------


class _Ending:
    """Tells the caller how the process ends, once, in the process that was started."""

    def __init__(self, on_end: Callable[[str], None], on_signal: Callable[[str], None]) -> None:
        self.how = "completed"
        self._on_end = on_end
        self._on_signal = on_signal

    def watch(self) -> None:
        # Exit handlers run last to first: registered ahead of the script, this one comes after all others.
        atexit.register(self._exit)
        os.register_at_fork(after_in_child=self._forget)
        for number in _DEADLY_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._signal)

    def _exit(self) -> None:
        self._restore_signals()  # what is on disk by now can be read, if it comes to that
        self._on_end(self.how)

    def _signal(self, number: int, _: FrameType | None) -> None:
        if signal.getsignal(number) != self._signal:
            return  # called by the script's own handler as its predecessor: without gradtrace it had none
        for other in (*_DEADLY_SIGNALS, signal.SIGINT):  # one more must not end what is done because of this one
            signal.signal(other, signal.SIG_IGN)
        try:
            self._on_signal(f"signal {signal.Signals(number).name}")
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _forget(self) -> None:
        atexit.unregister(self._exit)
        self._restore_signals()

    def _restore_signals(self) -> None:
        for number in _DEADLY_SIGNALS:
            if signal.getsignal(number) == self._signal:
                signal.signal(number, signal.SIG_DFL)


def _strip_last_traceback() -> None:
    """Have the exception that is about to leave the interpreter shown without gradtrace's frames."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        strip_own_frames(value, __name__)
        sys.last_traceback = value.__traceback__
        show(kind, value, value.__traceback__)

    sys.excepthook = excepthook


def _strip_thread_tracebacks() -> None:
    """The same for exceptions that end a thread."""
    show = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            strip_own_frames(args.exc_value, __name__)
            traceback = args.exc_value.__traceback__
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, traceback, args.thread))
        show(args)

    threading.excepthook = excepthook
