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
from gradtrace.trace.schema import SCHEMA_VERSION

METADATA_KEY = b"gradtrace"


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
    ``every``: of these steps those whose number it divides are kept in full, and those around incidents. Times are
    ISO 8601, UTC.
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

    def to_json(self) -> str:
        """Return the document that ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> RunInfo:
        """Read a document that ``to_json`` wrote, from this or an older version.

        ``source`` names the file in errors. Keys that this version does not know are left out.

        Raises:
            NotARunError: the text is no such document, or a newer gradtrace wrote it.
        """
        try:
            values = json.loads(text)
            version = int(values["schema_version"])
        except (ValueError, KeyError, TypeError):
            raise NotARunError(f"{source} holds no readable gradtrace metadata") from None
        if version > SCHEMA_VERSION:
            raise NotARunError(
                f"{source} has schema version {version}; this gradtrace reads up to {SCHEMA_VERSION}: "
                "upgrade gradtrace to read it"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        module_keys = {f.name for f in dataclasses.fields(ModuleInfo)}
        kept = {key: value for key, value in values.items() if key in known}
        kept["modules"] = [
            ModuleInfo(**{k: v for k, v in row.items() if k in module_keys}) for row in values.get("modules", [])
        ]
        return cls(**kept)
