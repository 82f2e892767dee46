"""Every error and warning that gradtrace raises on purpose: one base class, one sentence each.

A message is one line that says what is wrong and what to do; the command line prints it as it stands.
"""

from __future__ import annotations


class GradtraceError(Exception):
    """Base of all errors that gradtrace raises on purpose."""


class RunNotFoundError(GradtraceError):
    """There is no run at that path."""


class NotARunError(GradtraceError):
    """The file exists, but it is no recording that this gradtrace can read."""


class RunClosedError(GradtraceError):
    """A run was asked after it was closed."""


class RunExistsError(GradtraceError):
    """A recording would overwrite an older one."""


class QueryError(GradtraceError):
    """A query was refused, by gradtrace or by DuckDB."""


class NoMatchError(GradtraceError):
    """A pattern, step, rank or incident was asked for that the run does not have."""


class CaptureError(GradtraceError):
    """The recording cannot be started as asked."""


class CapsuleError(GradtraceError):
    """A failing step cannot be put into a capsule, or a capsule cannot be checked against a script."""


class MissingPackageError(GradtraceError):
    """What was asked for needs a package that is not installed; the message has the line that installs it."""


class GradtraceWarning(UserWarning):
    """Category of every warning that gradtrace issues."""


class NonFiniteError(GradtraceError):
    """The fuse: something that matters is non-finite, and the recording was asked to stop the run then.

    ``step`` is the step; the message names the boundary and the command that gives the full verdict.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
