"""A terminal for the examples of the documentation, and how what it shows is compared with what a page shows.

Output has to be the same word for word, but for what differs from machine to machine, and this is all of it:

* sizes on disk, such as 45.3 KiB;
* measured values, which are written with a decimal point: to within a fifth, or 0.01;
* the white space and the rules of tables, which follow from the widths of these.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from gradtrace_cli.main import main

_SIZE = re.compile(r"\d+(\.\d+)? (B|kB|MB|KiB|MiB)\b")
_RULE = re.compile(r"-{5,}")
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?"
_WORD = re.compile(rf"{_NUMBER}|\w+|[^\w\s]")
_IN_A_PROCESS = ("record", "recheck")
"""These run a script, which has to be alone in its process."""


class Shown(NamedTuple):
    """A command and what is shown of it."""

    command: str
    output: str


def session(text: str) -> list[Shown]:
    """Return the commands of a block whose command lines begin with ``$ ``, each with the lines that follow."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    assert parts[0] == "", "a session begins with a command"
    return [Shown(command, output) for command, output in zip(parts[1::2], parts[2::2], strict=True)]


def run(line: str, folder: Path) -> str:
    """Run a line ``gradtrace ...`` in a folder, and return what stands in the terminal then."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "gradtrace", line
    return _in_a_process(arguments, folder) if arguments[0] in _IN_A_PROCESS else _in_this_one(arguments, folder)


def differences(shown: str, seen: str) -> list[tuple[str, str]]:
    """Return the pairs of lines that are not the same: as the page shows them, and as they were seen."""
    pairs = zip_longest(shown.strip().splitlines(), seen.strip().splitlines(), fillvalue="")
    return [(one, other) for one, other in pairs if not _alike(one, other)]


def _alike(shown: str, seen: str) -> bool:
    words, others = _words(shown), _words(seen)
    return len(words) == len(others) and all(map(_is_same, words, others))


def _words(line: str) -> list[str]:
    return _WORD.findall(_RULE.sub("-----", _SIZE.sub("SIZE", line)))


def _is_same(word: str, other: str) -> bool:
    if word == other:
        return True
    is_measured = all(re.fullmatch(_NUMBER, text) for text in (word, other)) and "." in word + other
    return is_measured and math.isclose(float(word), float(other), rel_tol=0.2, abs_tol=0.01)


def _in_a_process(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gradtrace", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


def _in_this_one(arguments: list[str], folder: Path) -> str:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with _inside(folder), contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        main(arguments)
    screen.seek(0)
    return screen.read()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
