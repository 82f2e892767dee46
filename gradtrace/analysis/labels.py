"""Names of modules: what they are called in words and tables, where '' and NULL would not be understood, and how they
lie in each other. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

ROOT = "(root)"
OUTSIDE = "outside any module"

_DEEPEST = 1_000
"""Levels above a module that are looked at: Python calls no deeper, and a hostile name may have a million dots."""


def module_label(name: str | None) -> str:
    """Return the name that people are shown: a word for the root and for no module, quotes around a name that is one.

    A name that begins or ends with blanks is in quotes, too.
    """
    if not name:
        return OUTSIDE if name is None else ROOT
    return f'"{name}"' if name in (ROOT, OUTSIDE) or name != name.strip() else name


def names_above(name: str) -> Iterator[str]:
    """Yield the names of what a module lies in, from the nearest up to the root's, '', which has none."""
    for _ in range(_DEEPEST):
        if not name:
            return
        name = name.rpartition(".")[0]
        yield name
