"""The settings of a recording: one table of them, and where their values come from.

What is said last and closest wins: an option of ``record`` or an argument in code, then a variable ``GRADTRACE_*``,
then ``[tool.gradtrace]`` in pyproject.toml, then the default. A key has one name, ``first_step``, from which come
``--first-step`` and ``GRADTRACE_FIRST_STEP``. Only ``record`` and ``gradtrace.trace`` read settings.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from gradtrace.errors import CaptureError
from gradtrace.setting_kinds import GLOBS, PATH, SIZE, STEPS, TRUTH, Kind, StepRange, choice, real, whole

Mode = Literal["full", "watch"]
Switch = Literal["off", "watch", "full"]

PREFIX = "GRADTRACE_"
SWITCH = "GRADTRACE"
"""The variable that switches ``trace`` blocks in the user's code; no setting, and above all of them."""

_FILE = "pyproject.toml"
_FACTOR = real("X", lambda number: number > 1, "a number above 1")
_SHARE = real("X", lambda number: 0 <= number <= 1, "a number from 0 to 1")


def _about(shown: str, kind: Kind, meaning: str) -> dict[str, Any]:
    return {"shown": shown, "kind": kind, "meaning": meaning}


@dataclass(frozen=True)
class Settings:
    """The values of all settings, checked, by their keys."""

    mode: Mode = field(
        default="full",
        metadata=_about(
            "full",
            choice("full", "watch"),
            "Which steps are captured in full: all, or those of `every` and `steps` (`full`), or the first ones and a "
            "few after something unusual (`watch`). The others are watched.",
        ),
    )
    every: int = field(
        default=1, metadata=_about("1", whole("N", 1), "Capture every Nth step in full and watch the others.")
    )
    steps: StepRange | None = field(
        default=None,
        metadata=_about("all", STEPS, "Capture in full only steps A up to, not including, B, and watch the others."),
    )
    first_step: int = field(
        default=0, metadata=_about("0", whole("N", 0), "Number of the first step, for a resumed training.")
    )
    include: tuple[str, ...] = field(default=(), metadata=_about("all", GLOBS, "Only modules whose name matches GLOB."))
    exclude: tuple[str, ...] = field(default=(), metadata=_about("none", GLOBS, "No modules whose name matches GLOB."))
    engine: Literal["graph", "hooks"] = field(
        default="graph",
        metadata=_about(
            "graph", choice("graph", "hooks"), "How modules are watched: `graph`, or torch's own module `hooks`."
        ),
    )
    op_steps: StepRange | None = field(
        default=None,
        metadata=_about("none", STEPS, "Record every operation of steps A up to, not including, B. Slow."),
    )
    keep_compiled: bool = field(
        default=False,
        metadata=_about(
            "false", TRUTH, "Let compiled code run compiled; of it only the outermost modules' boundaries are seen."
        ),
    )
    loss_lines: bool = field(
        default=True,
        metadata=_about(
            "true", TRUTH, "Note the source lines of the loss code; costs much where the loss is very long."
        ),
    )
    on_nonfinite: Literal["continue", "stop"] = field(
        default="continue",
        metadata=_about(
            "continue",
            choice("continue", "stop"),
            "Stop the run before bad gradients reach the weights, or go on.",
        ),
    )
    replays: int = field(
        default=3, metadata=_about("3", whole("N", 0), "Run at most N failing passes again, to name the operation.")
    )
    capsule_limit: int = field(
        default=2**30,
        metadata=_about("1GiB", SIZE, "Save no capsule of a failing step that is larger than this; 0 for none at all."),
    )
    max_size: int = field(
        default=2_000_000_000,
        metadata=_about("2GB", SIZE, "Thin older full steps where a rank's file would exceed this; 0 for no bound."),
    )
    baseline: str | None = field(
        default=None,
        metadata=_about(
            "none", PATH, "An earlier run; with another model than that one's, more first steps are captured."
        ),
    )
    watch_first: int = field(default=5, metadata=_about("5", whole("N", 0), "Capture the first N steps."))
    watch_after: int = field(
        default=3, metadata=_about("3", whole("N", 0), "Capture N steps after something unusual, or an incident.")
    )
    watch_lr_factor: float = field(
        default=2.0,
        metadata=_about("2", _FACTOR, "Unusual: a learning rate that changes by more than this factor in one step."),
    )
    watch_spike_factor: float = field(
        default=10.0,
        metadata=_about("10", _FACTOR, "Unusual: a loss or gradient norm above X times its running median."),
    )
    watch_spike_window: int = field(
        default=100, metadata=_about("100", whole("N", 10), "Steps that the running median is taken of.")
    )
    watch_share: float = field(
        default=0.01,
        metadata=_about("0.01", _SHARE, "Of all steps after the first 100, capture no more than this share."),
    )
    watch_changed_first: int = field(
        default=20,
        metadata=_about("20", whole("N", 0), "Capture the first N steps where the model differs from the baseline's."),
    )


@dataclass(frozen=True)
class Setting:
    """One setting; ``shown`` is its default as people write it."""

    key: str
    default: Any
    shown: str
    kind: Kind
    meaning: str

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()


SETTINGS = {each.name: Setting(each.name, each.default, **each.metadata) for each in dataclasses.fields(Settings)}


def load(given: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings as they are configured, with the values that were ``given`` on the spot above all others.

    Those are taken as they are. ``pyproject.toml`` is the first of the working directory and those above it that has
    a table ``[tool.gradtrace]``. A variable that is set to nothing is not set.

    Raises:
        CaptureError: a file or a variable has an unknown key or a bad value, or the file cannot be read.
    """
    from_variables = _of_variables(os.environ if environ is None else environ)
    return Settings(**{**_of_file(), **from_variables, **given})


def trace_switch(environ: Mapping[str, str] | None = None) -> Switch | None:
    """Return what the variable ``GRADTRACE`` says of ``trace`` blocks; None where it is not set.

    Raises:
        CaptureError: it is something else.
    """
    text = (os.environ if environ is None else environ).get(SWITCH)
    if not text:
        return None
    for word in get_args(Switch):
        if text == word:
            return cast("Switch", word)
    raise CaptureError(f"{SWITCH}: {text!r} is not one of {', '.join(map(repr, get_args(Switch)))}")


def _of_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    variables = {setting.variable: setting for setting in SETTINGS.values()}
    values = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or not text:
            continue
        if name not in variables:
            near = _nearest(name.removeprefix(PREFIX).lower())
            raise CaptureError(f"{name} is no setting of gradtrace; did you mean {SETTINGS[near].variable}?")
        setting = variables[name]
        values[setting.key] = _checked(setting.kind.read, text, name)
    return values


def _of_file() -> dict[str, Any]:
    for directory in _directories():
        file = os.path.join(directory, _FILE)
        table = _table(file) if os.path.isfile(file) else None
        if table is not None:
            return {key: _value(file, key, value) for key, value in table.items()}
    return {}


def _directories() -> Iterable[Path]:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # removed meanwhile
        return ()
    return (here, *here.parents)


def _table(file: str) -> dict[str, Any] | None:
    """Return ``[tool.gradtrace]`` of a file; a file that does not mention it is passed over unread."""
    try:
        data = Path(file).read_bytes()
        if b"gradtrace" not in data:
            return None
        content = _parsed(data.decode())
    except OSError as error:
        raise CaptureError(f"{file} cannot be read for settings: {error.strerror}") from None
    except ValueError as error:
        raise CaptureError(f"{file} is not TOML: {error}") from None
    except RecursionError:
        raise CaptureError(f"{file} is not TOML that can be read: it is nested too deeply") from None
    tools = content.get("tool")
    table = tools.get("gradtrace") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise CaptureError(f"{file}: tool.gradtrace is {table!r}; it is a table of settings")
    return table


def _parsed(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content: dict[str, Any] = tomllib.loads(text)
    return content


def _value(file: str, key: str, value: object) -> Any:
    if key not in SETTINGS:
        near = _nearest(key)
        raise CaptureError(f"{file}: tool.gradtrace has no setting {key!r}; did you mean {near!r}?")
    kind = SETTINGS[key].kind
    checked = _checked(kind.take, value, f"{file}: tool.gradtrace.{key}")
    return os.path.join(os.path.dirname(file), checked) if kind is PATH else checked


def _checked(read: Any, value: object, place: str) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise CaptureError(f"{place}: {error}") from None


def _nearest(key: str) -> str:
    import difflib

    return difflib.get_close_matches(key.replace("-", "_").lower(), SETTINGS, n=1, cutoff=0.0)[0]
