"""``Site``: what a record is of. The same records come in every step, so their sites are made once and kept.

A site is told by identity: two rows with the same site have the same phase, module, tensor, path and remark. Which
call of the module it was, and in which micro step, is the row's own.
"""

from __future__ import annotations

from typing import Any, Protocol


class Named(Protocol):
    """Whatever a row belongs to; asked for its name when the step ends, not before."""

    @property
    def name(self) -> str | None: ...


_MOST_PATHS = 10_000
"""Of one kind of tensor of one owner; a path may hold a key that is another one in each step."""
_MOST_REMARKS = 64
"""Of one site; a graph may be gone through any number of times, and the remark says which time it is."""

Source = tuple[Any, str | None, int | None]
"""Of an operation's row: its name, which is asked for when the step ends, and file and line in the user's code."""


class Site:
    """The part of a row that no measuring is needed for; ``detail`` is a remark."""

    __slots__ = ("_remarked", "detail", "owner", "path", "phase", "source", "tensor")

    def __init__(
        self,
        phase: str,
        owner: Named | None,
        tensor: str,
        path: str,
        detail: str | None = None,
        source: Source | None = None,
    ) -> None:
        self.phase = phase
        self.owner = owner
        self.tensor = tensor
        self.path = path
        self.detail = detail
        self.source = source
        self._remarked: dict[str, Site] = {}

    def remarked(self, detail: str) -> Site:
        """Return the same site with a remark."""
        site = self._remarked.get(detail)
        if site is None:
            if len(self._remarked) >= _MOST_REMARKS:
                self._remarked.clear()
            site = self._remarked[detail] = Site(self.phase, self.owner, self.tensor, self.path, detail, self.source)
        return site


class Paths(dict[str, Site]):
    """The sites of one kind of tensor of one owner, by path; a path that is new is added."""

    __slots__ = ("_owner", "_phase", "_tensor")

    def __init__(self, phase: str, owner: Named | None, tensor: str) -> None:
        super().__init__()
        self._phase = phase
        self._owner = owner
        self._tensor = tensor

    def __missing__(self, path: str) -> Site:
        if len(self) >= _MOST_PATHS:
            self.clear()
        site = self[path] = Site(self._phase, self._owner, self._tensor, path)
        return site


class CallSites:
    """The sites of a module's calls in one phase."""

    __slots__ = ("grad_input", "grad_output", "input", "output")

    def __init__(self, phase: str, owner: Named) -> None:
        self.input = Paths(phase, owner, "input")
        self.output = Paths(phase, owner, "output")
        self.grad_output = Paths("backward", owner, "grad_output")
        self.grad_input = Paths("backward", owner, "grad_input")


class SitesOfModule(dict[str, CallSites]):
    """The sites of a module's calls, by phase."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Named) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, phase: str) -> CallSites:
        sites = self[phase] = CallSites(phase, self._owner)
        return sites


class SitesOfState(dict[str, Site]):
    """The sites of a parameter or buffer, by phase."""

    __slots__ = ("_kind", "_name", "_owner")

    def __init__(self, owner: Named, kind: str, name: str) -> None:
        super().__init__()
        self._owner = owner
        self._kind = kind
        self._name = name

    def __missing__(self, phase: str) -> Site:
        site = self[phase] = Site(phase, self._owner, self._kind, self._name)
        return site
