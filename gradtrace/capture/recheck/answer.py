"""The answer of the process that rechecks a step, and the end of that process. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gradtrace.errors import GradtraceError


class Answer:
    """Where the answer goes; the first one counts, and ends the process."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._process = os.getpid()

    def result(self, values: dict[str, Any]) -> NoReturn:
        """Answer with what was found."""
        self._give(values)

    def error(self, words: str) -> NoReturn:
        """Answer that nothing could be found, and why."""
        self._give({"error": words})

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``; its errors are the answer, for the script must not see them."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._process:  # a forked worker checks nothing
                return None
            try:
                return function(*args, **kwargs)
            except GradtraceError as error:
                self.error(str(error))
            except Exception as error:
                traceback.print_exc()
                self.error(f"an error of gradtrace's own: {type(error).__name__}: {error}")

        return call

    def _give(self, values: dict[str, Any]) -> NoReturn:
        try:
            partial = self.path.with_suffix(".tmp")
            partial.write_text(json.dumps(values))
            partial.rename(self.path)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            for worker in multiprocessing.active_children():
                worker.terminate()
        finally:
            os._exit(0)
