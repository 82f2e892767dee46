"""Which modules of a run were seen, and in words which were not, since what they ran inside of is not Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from gradtrace.capture.names import ModuleEntry

_SCRIPTED = frozenset({"ScriptModule", "RecursiveScriptModule", "TracedModule", "TopLevelTracedModule"})
_MOST_NAMES = 8


def unseen_below(names: Iterable[str], modules: Iterable[ModuleEntry]) -> tuple[int, str]:
    """Return how many modules below those that are named were never seen, and the outermost of the names."""
    named = sorted(set(names))
    outermost = [name for name in named if not any(_is_below(name, other) for other in named)]
    unseen = [
        entry
        for entry in modules
        if _has_code(entry) and not (entry.calls or entry.transparent) and _is_below_any(entry.name, outermost)
    ]
    return len(unseen), listed([name or "the root" for name in outermost])


def scripted_note(modules: Sequence[ModuleEntry]) -> str | None:
    """Say which modules are parts of scripted ones that were called, if there are any."""
    called = [entry.name for entry in modules if entry.info.type in _SCRIPTED and entry.calls]
    count, names = unseen_below(called, modules)
    words = f"{in_words(count)} ran inside of scripted ones (torch.jit) and cannot be seen: below {names}"
    return words if count else None


@contextlib.contextmanager
def not_counted(modules: Sequence[ModuleEntry]) -> Iterator[None]:
    """Count no call of these modules: that a replay sees them does not mean that the run was seen."""
    before = [entry.calls for entry in modules]
    try:
        yield
    finally:
        for entry, calls in zip(modules, before, strict=True):
            entry.calls = calls


def in_words(count: int) -> str:
    """Return a number of modules in words."""
    return f"{count:,} {'module' if count == 1 else 'modules'}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in words; a long one is cut short."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _has_code(entry: ModuleEntry) -> bool:
    """Whether a module can be called: ModuleList and the like cannot."""
    return entry.info.file is not None or entry.info.type in _SCRIPTED


def _is_below_any(name: str, others: Iterable[str]) -> bool:
    return any(_is_below(name, other) for other in others)


def _is_below(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))
