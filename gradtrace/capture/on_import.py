"""Calls back when a module has been imported.

Recording starts when the script itself imports torch, not before it runs: what a script does ahead of that
import (``OMP_NUM_THREADS`` and other settings that libraries read when they are loaded, warning filters) must
act as it does without gradtrace.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # slow to import


class ImportWatch:
    """A finder on ``sys.meta_path`` that waits for one top-level module.

    ``call`` is called once, in the importing thread, after the module's code has run and before the import
    returns; at once if the module is there already. An import that fails leaves the watch in place.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call
        self._looking = False

    def start(self) -> None:
        """Watch from now on."""
        if self._name in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that tells when it is done."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _TellingLoader(spec.loader, self._executed))
        return spec

    def _executed(self) -> None:
        if self in sys.meta_path:
            self.stop()
            self._call()


class _TellingLoader:
    """Stands before a module's loader until the module is about to run; then it leaves no trace."""

    def __init__(self, loader: Loader, executed: Callable[[], None]) -> None:
        self._loader = loader
        self._executed = executed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._executed()
