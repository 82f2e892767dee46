"""How a recording speaks while the training runs: by warnings, or to the one who has asked to be told."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from gradtrace.errors import GradtraceWarning
from gradtrace.trace.sent import let_pass

_listener: Callable[[str], None] | None = None


def tell_warnings_to(listener: Callable[[str], None] | None) -> None:
    """Have ``listener`` told what would be a warning, which a script's filters may swallow; None is the usual way."""
    global _listener
    _listener = listener


def warn(message: str) -> None:
    """Say something, and let nothing come of it: the user's filters may turn warnings into errors."""
    try:
        if _listener is not None:
            _listener(message)
        else:
            warnings.warn(message, GradtraceWarning, stacklevel=3)
    except Exception as error:
        let_pass(error)
