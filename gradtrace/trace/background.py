"""One thread that does a writer's jobs in their order, so that the training does not wait for them.

Not ``concurrent.futures``: its ``submit`` holds a lock that a signal handler would wait for in vain, and it takes no
more jobs once the main thread has ended, though a training may go on in another one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from gradtrace.trace.sent import let_pass

Job: TypeAlias = Callable[[], None]
_Jobs: TypeAlias = "SimpleQueue[Job | None]"
_Results: TypeAlias = "SimpleQueue[Exception | None]"


class Background:
    """Does jobs one after another in a thread that starts with the first of them.

    ``abandon`` may be called from a signal handler, whatever the handler has interrupted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._results: _Results = SimpleQueue()
        self._unanswered = 0
        self._thread: threading.Thread | None = None
        # An idle thread ends with the object that it works for.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Job) -> None:
        """Have ``job`` done after those before it; where no thread can be had, it is done at once."""
        self._unanswered += 1
        try:
            self._start()
        except RuntimeError as error:  # an interpreter that exits, or a process with too many threads
            let_pass(error)
            self._results.put(_result(job))
        else:
            self._jobs.put(job)

    def wait(self, allowed: int) -> None:
        """Wait while more than ``allowed`` jobs are not done.

        Raises:
            Exception: what one of the jobs raised.
        """
        while self._unanswered and (self._unanswered > allowed or not self._results.empty()):
            error = self._results.get()
            self._unanswered -= 1
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for all jobs, and for the thread to end."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def abandon(self) -> None:
        """Begin no further job, and wait for none."""
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            self._jobs.put(None)

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, because the interpreter waits for all others before it calls the exit handlers, and with
            # these the recording ends.
            thread = threading.Thread(target=_work, args=(self._jobs, self._results), name=self._name, daemon=True)
            thread.start()
            self._thread = thread


def _work(jobs: _Jobs, results: _Results) -> None:
    while (job := jobs.get()) is not None:
        results.put(_result(job))
        del job  # the writer, which would otherwise live for as long as no other job comes


def _result(job: Job) -> Exception | None:
    try:
        job()
    except Exception as error:
        return error
    except BaseException as error:  # that another thread has sent here; without an answer the training would hang
        return RuntimeError(f"interrupted by {type(error).__name__}")
    return None
