"""Exceptions of the script's own that come up in gradtrace's code.

A signal's handler runs wherever the program happens to be, and what it raises (a timeout, mostly) is meant for the
script; so is what is raised in a thread from outside. Everything else that comes up there is gradtrace's.
"""

from __future__ import annotations

from itertools import chain
from types import FrameType, TracebackType

_LIBRARIES = frozenset({"builtins", "torch", "gradtrace", "pyarrow", "numpy"})
"""Packages whose exceptions gradtrace's own code may raise."""


def sent(error: BaseException) -> BaseException | None:
    """Return the exception that was meant for the script: this one or one that it came of; None if there is none."""
    if not isinstance(error, Exception):
        return error
    seen: set[int] = set()
    linked: BaseException | None = error
    while linked is not None and id(linked) not in seen:
        seen.add(id(linked))
        if _is_raised_by_handler(linked.__traceback__) or _is_raised_from_outside(linked):
            return linked
        linked = linked.__cause__ or linked.__context__
    return None


def let_pass(error: BaseException) -> None:
    """Raise the exception that was meant for the script, if there is one; asked for wherever errors are caught."""
    if (meant_for_script := sent(error)) is None:
        return
    context, is_hidden = meant_for_script.__context__, meant_for_script.__suppress_context__
    try:
        raise meant_for_script
    finally:  # it is to be shown with what the script knows of it, not with what gradtrace made of it
        meant_for_script.__context__, meant_for_script.__suppress_context__ = context, is_hidden


def _is_raised_by_handler(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if _is_handler(traceback.tb_frame):
            return True
        traceback = traceback.tb_next
    return False


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame is that of a signal's handler: Python gives it the frame that it interrupts."""
    interrupted, code = frame.f_back, frame.f_code
    if interrupted is None or _package(frame) == "gradtrace":
        return False
    values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]]
    several = [value for value in values if type(value) is tuple]
    # By identity: what else is among the arguments may be compared in any way, as numpy's arrays are.
    return any(value is interrupted for value in chain(values, *several))


def _is_raised_from_outside(error: BaseException) -> bool:
    """Whether an exception of a foreign class was raised in gradtrace's own code: another thread has sent it there."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    is_ours = traceback is not None and _package(traceback.tb_frame) == "gradtrace"
    return is_ours and type(error).__module__.partition(".")[0] not in _LIBRARIES


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
