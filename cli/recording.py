"""A recording from the command line's side: the script, the tracer's life, the last words."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from gradtrace.capture.block import tracer_arguments
from gradtrace.capture.on_import import ImportWatch
from gradtrace.capture.script import Script, check_script, run_script
from gradtrace.capture.voice import tell_warnings_to
from gradtrace.errors import CaptureError, GradtraceError, GradtraceWarning, RunExistsError, RunNotFoundError
from gradtrace.printable import printable

from .lines import line
from .record_plan import RecordPlan
from .record_summary import Line, first_nan, last_words, moved_aside

if TYPE_CHECKING:
    from gradtrace.capture.tracer import Tracer


def check(plan: RecordPlan) -> None:
    """See that there is a script, and no older run where none is to be replaced.

    Of several ranks the first may have made their directory already: that is left to the tracer.

    Raises:
        CaptureError: there is no such script, or the baseline is where several ranks are to write.
        RunExistsError: there is such a run.
        RunNotFoundError: there is no such baseline.
    """
    check_script(_script(plan))
    single = os.environ.get("WORLD_SIZE") in (None, "", "1")
    if plan.existing == "refuse" and single and _is_there(plan.path):
        raise RunExistsError(f"{plan.path} exists; pass --force to replace it, or -o to write elsewhere")
    _check_baseline(plan, single)


def _check_baseline(plan: RecordPlan, single: bool) -> None:
    baseline = plan.settings.baseline
    if plan.settings.mode != "watch" or baseline is None:
        return
    if not _is_there(baseline):
        raise RunNotFoundError(f"no such run: {baseline}, the baseline")
    if not single and os.path.realpath(baseline) == os.path.realpath(plan.path):
        # The first of the ranks moves it away before the others have read it.
        raise CaptureError(f"several ranks cannot replace the baseline, {baseline}; pass -o to write elsewhere")


def _is_there(path: str) -> bool:
    return os.path.lexists(path) or os.path.exists(f"{path}.parts")


def run(plan: RecordPlan) -> None:
    """Run the script. The recording begins when it imports torch and ends with the process."""
    recording = Recording(plan)
    recording.watch.start()
    run_script(_script(plan), on_end=recording.end, on_signal=recording.end_quickly)


def _script(plan: RecordPlan) -> Script:
    return Script(plan.script, plan.args, plan.is_module)


class Recording:
    """Starts the tracer when torch arrives and stops it when the process ends; no failure leaves it."""

    def __init__(self, plan: RecordPlan) -> None:
        self.watch = ImportWatch("torch", self._start)
        self._plan = plan
        # The script may change the directory before it imports torch.
        self._path = os.path.abspath(plan.path)
        baseline = plan.settings.baseline
        self._settings = replace(plan.settings, baseline=baseline and os.path.abspath(baseline))
        self._tracer: Tracer | None = None
        self._failed = False

    def _start(self) -> None:
        _show_own_warnings()
        self._failed = True
        try:
            tracer = self._new_tracer()
            tracer.start()
        except GradtraceError as error:
            # Asked for what cannot be: better said now than after hours of a run that nobody recorded.
            say(f"error: {error}")
            raise SystemExit(2) from None
        except Exception as error:
            warn(f"nothing is recorded: {_reason(error)}; the script goes on")
            return
        self._failed = False
        self._tracer = tracer
        self._tell(moved_aside(tracer, self._plan))

    def _new_tracer(self) -> Tracer:
        from gradtrace.capture.tracer import Tracer

        arguments = tracer_arguments(self._settings)
        tracer = Tracer(path=self._path, existing=self._plan.existing, command=self._plan.command, **arguments)
        prefix = f"rank {tracer.info.rank}: " if tracer.info.rank else ""
        tell_warnings_to(lambda text: warn(prefix + text))
        return tracer

    def end(self, how: str) -> None:
        """Finish the recording and say what came of it; a second Ctrl-C leaves it in its parts, a third one kills."""
        try:
            self.watch.stop()
            self._end(how)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._leave(how)
        except Exception as error:
            warn(f"the recording could not be finished: {_reason(error)}")

    def _end(self, how: str) -> None:
        if self._tracer is not None:
            self._tracer.stop(how)
            self._tell(last_words(self._tracer, self._plan))
        elif not self._failed:
            question = ". Does it run the model in a subprocess?" if how == "completed" else ""
            warn(f"{self._plan.script} did not import torch, so nothing was recorded{question}")

    def _leave(self, how: str) -> None:
        with contextlib.suppress(Exception):
            if self._tracer is not None:
                self._tracer.stop_quickly(how)
        warn(f"interrupted while finishing; what was recorded is kept: {first_nan(self._plan)}")

    def end_quickly(self, how: str) -> None:
        """Close what has been recorded so far; called from a signal's handler."""
        if self._tracer is None:
            return
        self._tracer.stop_quickly(how)
        if not self._plan.quiet and self._tracer.info.rank == 0:
            # Not through sys.stderr: the signal may have come while the script was writing to it.
            text = printable(f"gradtrace: {how}; what was recorded is kept: {first_nan(self._plan)}")
            os.write(2, f"{text}\n".encode())

    def _tell(self, lines: Iterable[Line]) -> None:
        for each in lines:
            if each.warning:
                warn(each.text)
            elif not self._plan.quiet:
                say(each.text)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _show_own_warnings() -> None:
    """Print gradtrace's warnings as the command line speaks; leave all others as they are."""
    show = warnings.showwarning

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, GradtraceWarning):
            warn(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning


def warn(text: str) -> None:
    """Print a warning of gradtrace's own."""
    say(f"warning: {text}")


def say(text: str) -> None:
    """Print a line of gradtrace's own on the stderr that the process was started with, if that is there."""
    stream: Any = sys.__stderr__
    try:
        line(f"gradtrace: {text}", stream)
        stream.flush()
    except (AttributeError, OSError, ValueError):  # none, broken, closed by the script
        return
