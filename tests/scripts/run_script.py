"""Runs a script through ``run_script`` alone and writes what its callbacks are told to a file.

Usage: run_script.py TOLD SCRIPT [ARGS...]
"""

import os
import sys

from gradtrace.capture.script import Script, run_script

path = os.path.abspath(sys.argv[1])


def note(text: str) -> None:
    with open(path, "a") as file:
        print(text, file=file)


run_script(
    Script(sys.argv[2], tuple(sys.argv[3:])),
    on_end=lambda how: note(f"end {how}"),
    on_signal=lambda how: note(f"signal {how}"),
)
