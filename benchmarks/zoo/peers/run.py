"""One peer on the scripts given, each in a process forked after the imports.

    python -m benchmarks.zoo.peers.run PEER FOLDER SCRIPT ...

The answer to ``name.py`` lies in FOLDER as ``name.json`` afterwards.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.zoo.peers.watching import Answer

TIMEOUT_S = 300


def main(peer: str, folder: str, *scripts: str) -> None:
    """Ask the peer about each script and write its answers; a script that kills its process is an answer too."""
    watcher = importlib.import_module(f"benchmarks.zoo.peers.{peer}")
    for script in map(Path, scripts):
        answer = Path(folder, script.stem).with_suffix(".json")
        child = os.fork()
        if child == 0:
            _ask(watcher.watch, script, answer)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not answer.exists():
            note = f"crashed: no answer, exit code {os.waitstatus_to_exitcode(status)}"
            answer.write_text(json.dumps({"found": False, "note": note}))


def _ask(watch: Callable[[Path], Answer], script: Path, answer: Path) -> None:
    """Write what ``watch`` says; what the script and the tool print is dropped."""
    signal.alarm(TIMEOUT_S)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        said = watch(script)
    except BaseException as error:  # whatever ends the script must not end the parent's loop
        said = {"found": False, "note": f"crashed: {type(error).__name__}: {error}".splitlines()[0]}
    answer.write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
