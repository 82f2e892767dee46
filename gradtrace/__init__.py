"""gradtrace: find where the first non-finite value of a PyTorch run was born.

The public names are loaded on first use, so that importing the package costs nothing and reading a run needs
no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradtrace.analysis.check.model import Checkup as Checkup
    from gradtrace.analysis.compare.model import Difference as Difference
    from gradtrace.analysis.run import Run as Run
    from gradtrace.analysis.run import open_run as open_run
    from gradtrace.analysis.sandbox import Result as Result
    from gradtrace.analysis.summary_model import Summary as Summary
    from gradtrace.analysis.verdict_model import Verdict as Verdict
    from gradtrace.capture.block import trace as trace
    from gradtrace.capture.recheck.ask import RecheckResult as RecheckResult
    from gradtrace.capture.recheck.ask import recheck as recheck
    from gradtrace.capture.tracer import Tracer as Tracer
    from gradtrace.errors import GradtraceError as GradtraceError
    from gradtrace.errors import GradtraceWarning as GradtraceWarning
    from gradtrace.errors import NonFiniteError as NonFiniteError

_HOME = {
    "RecheckResult": "gradtrace.capture.recheck.ask",
    "recheck": "gradtrace.capture.recheck.ask",
    "Checkup": "gradtrace.analysis.check.model",
    "Difference": "gradtrace.analysis.compare.model",
    "Run": "gradtrace.analysis.run",
    "open_run": "gradtrace.analysis.run",
    "Result": "gradtrace.analysis.sandbox",
    "Summary": "gradtrace.analysis.summary_model",
    "Verdict": "gradtrace.analysis.verdict_model",
    "Tracer": "gradtrace.capture.tracer",
    "trace": "gradtrace.capture.block",
    "GradtraceError": "gradtrace.errors",
    "GradtraceWarning": "gradtrace.errors",
    "NonFiniteError": "gradtrace.errors",
}

__all__ = ["__version__", *sorted(_HOME)]


class _Package(ModuleType):
    """Keeps ``gradtrace.trace`` the function: importing the subpackage of that name would put itself there."""

    @property
    def trace(self) -> Any:
        """The function of the public interface."""
        return __getattr__("trace")

    @trace.setter
    def trace(self, value: object) -> None:
        """Ignore the subpackage; ``import`` finds it without this."""


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
