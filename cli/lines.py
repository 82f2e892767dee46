"""The one door to stdout and stderr: what is written there was made printable, whoever named it.

No other module of the command line writes to a stream. Text that is data for a program (csv, JSON, a page) goes out by
``put``, everything that people read by ``line`` and ``say``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from gradtrace.printable import json_ascii, printable, shortened


@contextlib.contextmanager
def open_streams() -> Iterator[None]:
    """Let what is written go nowhere where the process was started without a stdout or stderr."""
    with contextlib.ExitStack() as opened:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            if getattr(sys, name) is None:
                opened.enter_context(redirect(opened.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        yield


def line(text: str = "", out: TextIO | None = None) -> None:
    """Write one line, by default to stdout."""
    out = out or sys.stdout
    put(out, f"{shown(text, out)}\n")


def say(text: str) -> None:
    """Write one line to stderr; where that takes nothing (a full disk), the answer is still an answer."""
    with contextlib.suppress(OSError):
        line(text, sys.stderr)
        sys.stderr.flush()


def shown(text: str, out: TextIO) -> str:
    """Return text as one line of ``out``: without control characters, and on a terminal of a length to be read."""
    return printable(shortened(text) if out.isatty() else text)


def put(out: TextIO, text: str, *, is_json: bool = False) -> None:
    """Write text as it is; characters that the encoding of ``out`` lacks become escapes, of JSON's own in JSON."""
    try:
        out.write(text)
    except UnicodeEncodeError:
        encoding = out.encoding or "ascii"
        out.write(json_ascii(text) if is_json else text.encode(encoding, "backslashreplace").decode(encoding))
