"""Where in the user's code an autograd node was made: what anomaly mode noted at the node, as source lines.

Anomaly mode writes the formatted stack to a node's metadata when the node is made, and there it stays after the
mode is switched off. Reads and words such stacks; switching the mode is the business of others.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from gradtrace.capture.operations.frames import NOT_THE_USERS, PACKAGE, RUNNER
from gradtrace.trace.confirmation import SourceLine

Notes = tuple[Sequence[str], ...]
"""Formatted stacks of a node, the best one first: they say where, and hold no node."""

_FRAME = re.compile(r'\s*File "(?P<file>.*?)", line (?P<line>\d+), in (?P<function>[^\n]*)(?:\n\s*(?P<code>[^\n]*))?')


def stack_of(node: Any) -> tuple[SourceLine, ...]:
    """Return the frames in which ``node`` was made, outside of torch and gradtrace, the innermost last.

    Empty for a node that was made while anomaly mode was off. A node of a double backward that was made in a
    thread of the engine has no frames of its own: it gets those of the node whose backward made it.
    """
    return lines_of(notes_of(node))


def notes_of(node: Any) -> Notes:
    """Return what anomaly mode noted at ``node`` and at those whose backward made it; cheap, parses nothing."""
    notes: list[Sequence[str]] = []
    while node is not None and len(notes) < 4:
        metadata = node.metadata
        if "traceback_" in metadata:
            notes.append(metadata["traceback_"])
        node = metadata.get("parent_")
    return tuple(notes)


def lines_of(notes: Notes) -> tuple[SourceLine, ...]:
    """Return the source lines of the first of these stacks that leads through the user's code."""
    for formatted in notes:
        lines = _users_lines(formatted)
        if lines:
            return lines
    return ()


def brief_stack() -> list[str]:
    """Return the stack as ``traceback.format_stack`` does, without the code, in a small part of its time.

    The code is looked up when somebody asks for it.
    """
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        frame = frame.f_back
    frames.reverse()
    return frames


def without_own_frames(formatted: Sequence[str]) -> list[str]:
    """Return a formatted stack without gradtrace's frames and without those that run the script."""
    files = [match["file"] if (match := _FRAME.match(frame)) else "" for frame in formatted]
    runner = max((place for place, file in enumerate(files) if file == RUNNER), default=-1)
    pairs = list(zip(formatted, files, strict=True))[runner + 1 :]
    return [frame for frame, file in pairs if not file.startswith(PACKAGE)]


def _users_lines(formatted: Sequence[str]) -> tuple[SourceLine, ...]:
    lines = [_parse(frame) for frame in formatted]
    runner = max((i for i, line in enumerate(lines) if line and line.file == RUNNER), default=-1)
    return tuple(line for line in lines[runner + 1 :] if line and not line.file.startswith(NOT_THE_USERS))


def _parse(formatted: str) -> SourceLine | None:
    match = _FRAME.match(formatted)
    if match is None:
        return None
    file, line = match["file"], int(match["line"])
    code = match["code"] or linecache.getline(file, line)
    return SourceLine(file, line, match["function"].strip(), code.strip())
