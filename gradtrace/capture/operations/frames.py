"""Where in the user's code is this? The frames of the running thread outside of torch and gradtrace."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType

import torch

import gradtrace
from gradtrace.trace.confirmation import SourceLine

PACKAGE = os.path.dirname(os.path.abspath(gradtrace.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
NOT_THE_USERS = (_TORCH, PACKAGE, "<frozen ")
"""How the names of files begin whose code is torch's, gradtrace's, or of Python's own import system."""
RUNNER = os.path.join(PACKAGE, "capture", "script.py")
"""Runs the user's script: the frames further out than its own are the command line's."""


def user_lines(base: CodeType | None = None) -> tuple[SourceLine, ...]:
    """Return the user's frames of this thread, the innermost last.

    The innermost frame that runs ``base``, and all frames outside of it, are left out, as are those that run
    the script.
    """
    lines: list[SourceLine] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not base and frame.f_code.co_filename != RUNNER:
        if is_users(frame.f_code):
            lines.append(line_of(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(lines))


def is_users(code: CodeType) -> bool:
    """Whether the code is neither torch's nor gradtrace's nor Python's own import system."""
    return not code.co_filename.startswith(NOT_THE_USERS)


def line_of(code: CodeType, number: int) -> SourceLine:
    """Return a line of the code, with its text."""
    # A frame between two lines has none.
    number = number or code.co_firstlineno
    return SourceLine(code.co_filename, number, code.co_name, linecache.getline(code.co_filename, number).strip())
