"""The process that runs a mended script against a capsule; ``ask.py`` starts it.

Usage: python -m gradtrace.capture.recheck.child CAPSULE ANSWER file|module SCRIPT [ARGS...]

The answer, a JSON file, holds what was found or why there is nothing to be found. With the answer the process is
over at once: nothing that the script would still do (``except``, ``finally``, exit handlers) can change it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradtrace.capture.on_import import ImportWatch
from gradtrace.capture.recheck.answer import Answer
from gradtrace.capture.script import Script, run_script

if TYPE_CHECKING:
    from gradtrace.capture.recheck.step import CheckedStep


class _Child:
    """Begins when the script imports torch, like ``record``."""

    def __init__(self, capsule: str, answer: Answer, script: Script) -> None:
        self.watch = ImportWatch("torch", answer.guarded(self._start))
        self._capsule = capsule
        self._answer = answer
        self._script = script
        self._step: CheckedStep | None = None

    def _start(self) -> None:
        from gradtrace.capture.recheck.step import CheckedStep

        self._step = CheckedStep(self._capsule, self._answer)
        self._step.watch()

    def script_ended(self, how: str) -> None:
        """The script ended by itself, before the optimizer."""
        if self._step is None:
            self._answer.error(f"{self._script.target} {_ended(how)} before it imported torch")
        self._step.script_ended(self._script.target, _ended(how), failed=how.startswith("exception"))


def _ended(how: str) -> str:
    if how.startswith("exception"):
        return f"failed ({how.removeprefix('exception ')}, traceback above)"
    return "ended" if how == "completed" else f"ended ({how})"


def main(arguments: list[str]) -> None:
    """Run the script; returns only when it has ended by itself."""
    capsule, path, kind, target, *args = arguments
    script = Script(target, tuple(args), kind == "module")
    answer = Answer(path)
    child = _Child(capsule, answer, script)
    child.watch.start()
    run_script(script, on_end=answer.guarded(child.script_ended), on_signal=lambda how: None)


if __name__ == "__main__":
    main(sys.argv[1:])
