"""Facts about a run that are not records, and how they travel in the Parquet file's key-value metadata.

``RunInfo`` is the whole contract between recording and reading apart from the rows themselves. It is kept as
one JSON document under the metadata key ``gradtrace``; while the run is being recorded the same document
stands in ``run.json`` beside the parts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from gradtrace.errors import NotARunError
from gradtrace.trace.checking import json_object, misfit, misfit_of_any
from gradtrace.trace.schema import SCHEMA_VERSION

METADATA_KEY = b"gradtrace"

STOPPED = "tracer failed: "
"""How ``RunInfo.end`` begins where the recording stopped before the training did; what follows is the reason."""

_MOST_RANKS = 2**20
_MOST = 2**31 - 1
_SHOWN = 80


class NewerRunError(NotARunError):
    """A newer gradtrace wrote it."""


@dataclass
class ModuleInfo:
    """One module of a traced model; the table of these, in model order, is the view ``modules``.

    ``name`` is what the column ``module`` holds. ``parameters`` maps the names of the module's own parameters
    to their shapes, written as in the column ``shape``.
    """

    name: str
    type: str
    root: bool = False
    depth: int = 0
    file: str | None = None
    line: int | None = None
    parameters: dict[str, str] = field(default_factory=dict)
    calls: int = 0


@dataclass
class RunInfo:
    """What is known of a run besides its records.

    ``end`` says how the run ended: ``running`` while it is recorded, then ``completed``, ``exit N``,
    ``exception NAME``, ``signal NAME``, or ``tracer failed: ...`` when recording stopped before the training
    did. ``unmeasured`` counts, by reason, boundaries that were seen but could not be measured or never fired. Of the
    ``steps``, ``captured`` were captured in full. ``config`` holds the options of the recording. ``thinned`` is empty
    unless older steps were thinned to stay within the limit on disk; then it has ``first_step``, ``last_step`` and
    ``every``: of these steps those whose number it divides are kept in full, and those around incidents. ``paced`` is
    empty unless steps were thinned as they came, the disk being slower than the training; then it has ``first_step``
    and ``last_step`` of them, and ``steps``, how many they were. Times are ISO 8601, UTC.
    """

    run_id: str
    schema_version: int = SCHEMA_VERSION
    gradtrace_version: str = ""
    attempt: int = 0
    rank: int = 0
    world_size: int = 1
    command: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    finished: str | None = None
    end: str = "running"
    steps: int = 0
    captured: int = 0
    last_step: int | None = None
    records: int = 0
    incidents: int = 0
    modules: list[ModuleInfo] = field(default_factory=list)
    unmeasured: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    thinned: dict[str, int] = field(default_factory=dict)
    paced: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the document that ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> RunInfo:
        """Read a document that ``to_json`` wrote, from this or an older version.

        ``source`` names the file in errors. Keys that this version does not know are left out.

        Raises:
            NotARunError: the text is no such document; a ``NewerRunError`` where a newer gradtrace wrote it.
        """
        try:
            values = json_object(text)
            version = values["schema_version"]
            if type(version) is not int or version < 1:
                raise ValueError(f"schema_version is {version!r}")
            if version > SCHEMA_VERSION:
                raise NewerRunError(
                    f"{source} has schema version {version}; this gradtrace reads up to {SCHEMA_VERSION}: "
                    "upgrade gradtrace to read it"
                )
            info = cls(**_known(values))
            info.modules = _known_modules(values.get("modules", []))
            _check_numbers(info)
        except KeyError as error:
            raise NotARunError(f"{source} holds no readable gradtrace metadata: it has no {error.args[0]}") from None
        except ValueError as error:
            reason = "it is no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeError)) else str(error)[:_SHOWN]
            raise NotARunError(f"{source} holds no readable gradtrace metadata: {reason}") from None
        return info


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the fields of a run that there are.

    Raises:
        KeyError: one is missing that has no default.
        ValueError: one is of another type.
    """
    names, needed = _FIELDS[RunInfo]
    known = {name: values[name] for name in names if name in values}
    if (name := misfit(RunInfo, known)) is not None:
        raise _misfit_error(name, known[name])
    for name in needed:
        known[name]
    return known


def _known_modules(rows: list[dict[str, Any]]) -> list[ModuleInfo]:
    """Return the modules, of which there may be a million.

    Raises:
        KeyError: a field is missing that has no default.
        ValueError: one is of another type.
    """
    names, needed = _FIELDS[ModuleInfo]
    if (found := misfit_of_any(ModuleInfo, rows)) is not None:
        raise _misfit_error(*found)
    for name in needed:
        for row in rows:
            row[name]
    return [ModuleInfo(**{name: row[name] for name in names if name in row}) for row in rows]


def _misfit_error(name: str, value: Any) -> ValueError:
    return ValueError(f"{name} is {json.dumps(value)[:_SHOWN]}")


def _check_numbers(info: RunInfo) -> None:
    """Refuse numbers that no run has; whoever counts up to one of them would never be done.

    Raises:
        ValueError: there is one; the message names it.
    """
    limits = {"rank": _MOST_RANKS, "world_size": _MOST_RANKS, "attempt": _MOST, "steps": None, "records": None}
    for name, most in limits.items():
        number = getattr(info, name)
        if number < 0 or (most is not None and number > most):
            raise ValueError(f"{name} is {number}")
    for module in info.modules:
        if not (0 <= module.depth <= _MOST and 0 <= (module.line or 0) <= _MOST):
            raise ValueError(f"modules has depth {module.depth} and line {module.line}")
    for name, count in (("thinned", "every"), ("paced", "steps")):
        if (found := getattr(info, name)) and not found.keys() >= {"first_step", "last_step", count}:
            raise ValueError(f"{name} is {json.dumps(found)[:_SHOWN]}")


_FIELDS = {
    kind: (
        [one.name for one in dataclasses.fields(kind)],
        [one.name for one in dataclasses.fields(kind) if one.default is one.default_factory is dataclasses.MISSING],
    )
    for kind in (RunInfo, ModuleInfo)
}
"""Of each class the names of all fields, and of those without a default."""
