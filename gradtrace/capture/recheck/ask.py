"""``recheck``: runs a mended script against the capsule of a failing step, in a process of its own.

This side starts the process and reads what it found; it loads no torch. The other side is ``child.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradtrace.capture.script import Script, check_script
from gradtrace.errors import CapsuleError, RunNotFoundError

Status = Literal["finite", "not finite", "not checked"]
_STDERR = 2


@dataclass(frozen=True)
class Part:
    """What became of one part of the step.

    ``boundary`` is the first non-finite one, ``reason`` says why nothing was checked. ``op`` and ``location`` are
    the autograd node that anomaly detection stopped at and the line that made it, ``message`` its own words.
    """

    status: Status
    boundary: str | None = None
    reason: str | None = None
    op: str | None = None
    location: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class RecheckResult:
    """What the captured step does in the script as it is now.

    ``step`` and ``failed`` say where the step of the capsule failed. ``complete`` is false where a part that is
    needed for an answer could not be checked.
    """

    step: int
    failed: str
    input: Part
    forward: Part
    loss: Part
    gradients: Part
    complete: bool
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, Part]:
        """The four parts by name, in the order in which they run."""
        return {"input": self.input, "forward": self.forward, "loss": self.loss, "gradients": self.gradients}

    @property
    def ok(self) -> bool:
        """Whether the step is mended: everything that is needed was checked, and all of it is finite."""
        return self.complete and all(part.status != "not finite" for part in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"ok": self.ok, **dataclasses.asdict(self), "notes": list(self.notes)}


def recheck(
    capsule: str | os.PathLike[str],
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    is_module: bool = False,
) -> RecheckResult:
    """Run ``script`` up to the captured step's optimizer and say whether input, forward, loss and gradients are finite.

    The script runs in another process, with the environment and the working directory of this one; what it prints
    goes to stderr. ``args`` are its command line arguments; with ``is_module`` it is a module's name.

    Raises:
        CaptureError: there is no such script.
        RunNotFoundError: there is no such capsule.
        CapsuleError: it is no capsule, the model no longer fits it, the script failed, or never came to the call.
    """
    plan = Script(os.fspath(script), tuple(args), is_module)
    check_script(plan)
    _check_file(capsule)
    with tempfile.TemporaryDirectory(prefix="gradtrace-") as folder:
        answer = Path(folder, "answer.json")
        command = [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            *("-m", "gradtrace.capture.recheck.child", os.path.abspath(capsule), str(answer)),
            *("module" if is_module else "file", plan.target, *plan.arguments),
        ]
        code = subprocess.run(command, stdout=_STDERR, check=False).returncode
        if not answer.exists():
            ended = f"signal {-code}" if code < 0 else f"exit {code}"
            raise CapsuleError(f"{plan.target} ended the process ({ended}) before anything could be checked")
        return _read(json.loads(answer.read_text(encoding="utf-8")))


def _check_file(capsule: str | os.PathLike[str]) -> None:
    if not os.path.exists(capsule):
        raise RunNotFoundError(f"no such capsule: {os.fspath(capsule)}")
    if not os.path.isfile(capsule):  # to look into a pipe would take for ever
        raise CapsuleError(f"{os.fspath(capsule)} is no file")
    if not zipfile.is_zipfile(capsule):
        raise CapsuleError(f"{os.fspath(capsule)} is no capsule of gradtrace")


def _read(values: dict[str, Any]) -> RecheckResult:
    if "error" in values:
        raise CapsuleError(values["error"])
    parts = {name: Part(**values.pop(name)) for name in ("input", "forward", "loss", "gradients")}
    return RecheckResult(**{**values, **parts, "notes": tuple(values["notes"])})
