"""Every error and warning that gradtrace raises on purpose: one base class, one sentence each.

A message is one line that says what is wrong and what to do; the command line prints it as it stands. What names and
paths in it hold of control characters is shown as escapes: an error ends on a terminal, or in a log.
"""

from __future__ import annotations

from gradtrace.printable import printable, printable_lines


class GradtraceError(Exception):
    """Base of all errors that gradtrace raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class RunNotFoundError(GradtraceError):
    """There is no run at that path."""


class NotARunError(GradtraceError):
    """The file exists, but it is no recording that this gradtrace can read."""


class RunClosedError(GradtraceError):
    """A run was asked after it was closed."""


class RunExistsError(GradtraceError):
    """A recording would overwrite an older one."""


class QueryError(GradtraceError):
    """A query was refused, by gradtrace or by DuckDB, whose words may take several lines."""

    def __str__(self) -> str:
        return printable_lines(Exception.__str__(self))


class QueryLimitError(QueryError):
    """A query took more time or memory than it was allowed."""


class NoMatchError(GradtraceError):
    """A pattern, step, rank or incident was asked for that the run does not have."""


class CaptureError(GradtraceError):
    """The recording cannot be started as asked."""


class CannotWriteError(GradtraceError):
    """The place of the recording takes no more. ``reason`` says why, the message also when, and what is kept."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CapsuleError(GradtraceError):
    """A failing step cannot be put into a capsule, or a capsule cannot be checked against a script."""


class MissingPackageError(GradtraceError):
    """What was asked for needs a package that is not installed; the message has the line that installs it."""


class GradtraceWarning(UserWarning):
    """Category of every warning that gradtrace issues."""

    def __str__(self) -> str:
        return printable(super().__str__())


class NonFiniteError(GradtraceError):
    """The fuse: something that matters is non-finite, and the recording was asked to stop the run then.

    ``step`` is the step; the message names the boundary and the command that gives the full verdict.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
