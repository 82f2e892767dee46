"""Tracebacks as they would be without gradtrace: its frames taken out, wherever they stand.

Knows nothing of what is run or recorded; works on exceptions alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

_OWN_PACKAGES = ("gradtrace", "gradtrace_cli")
_IMPORT_SYSTEM = "<frozen importlib"


def strip_own_frames(exception: BaseException, runner: str) -> None:
    """Take gradtrace's frames out of the tracebacks of an exception and of all that it is linked to.

    ``runner`` is the name of the module that runs the script: frames further out than its own are those of
    the command line and go too. Linked are causes, contexts and the members of exception groups.
    """
    pending, seen = [exception], {id(exception)}
    while pending:
        current = pending.pop()
        _strip(current, runner)
        for linked in _linked(current):
            if id(linked) not in seen:
                seen.add(id(linked))
                pending.append(linked)


def _linked(exception: BaseException) -> Iterator[BaseException]:
    for other in (exception.__cause__, exception.__context__):
        if other is not None:
            yield other
    members = getattr(exception, "exceptions", ())  # BaseExceptionGroup is not in Python 3.10
    if isinstance(members, tuple):
        yield from (member for member in members if isinstance(member, BaseException))


def _strip(exception: BaseException, runner: str) -> None:
    entries = list(_entries(exception.__traceback__))
    modules = [_module(entry) for entry in entries]
    inside = len(modules) - modules[::-1].index(runner) if runner in modules else 0
    kept: list[TracebackType] = []
    for entry, module in zip(entries[inside:], modules[inside:], strict=True):
        if module.partition(".")[0] not in _OWN_PACKAGES:
            kept.append(entry)
            continue
        # Python hides the import system's frames, but only as long as none of ours stands among them.
        while kept and kept[-1].tb_frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            kept.pop()
    if len(kept) < len(entries):
        exception.__traceback__ = _chain(kept)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))


def _chain(entries: list[TracebackType]) -> TracebackType | None:
    chain: TracebackType | None = None
    for entry in reversed(entries):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain
