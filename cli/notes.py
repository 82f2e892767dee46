"""What is to be said of a recording itself, on stderr, beside the answer to a question."""

from __future__ import annotations

from collections.abc import Iterable

from .lines import say


def say_notes(notes: Iterable[str]) -> None:
    """Print a line for each."""
    for note in notes:
        say(f"gradtrace: note: {note}")
