"""Finds models for the engine ``hooks`` when none were named: hooks are put on a root just before its first call."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradtrace.capture.calls import Calls
from gradtrace.capture.compiled import taken_for
from gradtrace.capture.hooks import ModuleHooks
from gradtrace.capture.interception import Call
from gradtrace.capture.session import Session, cannot_observe


class Discovery:
    """Looks at module calls only to register hooks on modules that nobody knows."""

    def __init__(self, session: Session, calls: Calls, hooks: ModuleHooks) -> None:
        self._session = session
        self._calls = calls
        self._hooks = hooks

    def around(self, call: Call) -> Call:
        """Return the function that stands in for ``nn.Module.__call__``."""
        find = self._session.guarded(self._find)

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            find(module)
            return call(module, *args, **kwargs)

        return __call__

    def _find(self, module: nn.Module) -> None:
        called, module = module, taken_for(module)
        if self._session.names.entry(module) is None and not cannot_observe():
            entry = self._calls.admit(module)
            if entry is not None:
                self._hooks.register(entry.root, self._calls)
                if called is not module:
                    self._calls.compiled.setdefault(entry)
