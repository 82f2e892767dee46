"""Kinds of settings: how a value is written as text and in TOML, and what it must be.

Readers raise ValueError with a sentence that says what is wrong; who calls them says where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

StepRange = tuple[int | None, int | None]

_UNITS = {"": 1, "b": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Kind:
    """One kind of value: ``what`` it is, in words, how ``read`` takes it from text, and what stands for it in the help.

    ``natives`` are the types of TOML, other than strings, in which it may be written.
    """

    metavar: str
    what: str
    read: Callable[[str], Any]
    natives: tuple[type, ...] = ()

    def take(self, value: object) -> Any:
        """Return the checked value of what stands in a TOML file.

        Raises:
            ValueError: it is none.
        """
        if isinstance(value, str) or type(value) in self.natives:
            return self.read(str(value))
        raise ValueError(f"{_in_toml(value)} is not {self.what}")


@dataclass(frozen=True)
class ListKind(Kind):
    """Several strings: a list of them in TOML, with commas between them as text."""

    def take(self, value: object) -> Any:
        """Return the strings of a list, or those of a text."""
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        return super().take(value)


def _in_toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def whole(metavar: str, least: int) -> Kind:
    """Return the kind of whole numbers from ``least`` up."""
    what = f"a whole number, {least} or more"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {what}") from None
        if number < least:
            raise ValueError(f"{number} is not {what}")
        return number

    return Kind(metavar, what, read, (int,))


def real(metavar: str, holds: Callable[[float], bool], what: str) -> Kind:
    """Return the kind of finite numbers for which ``holds`` is true; ``what`` says which those are."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {what}") from None
        if not (math.isfinite(number) and holds(number)):
            raise ValueError(f"{text} is not {what}")
        return number

    return Kind(metavar, what, read, (int, float))


def choice(*names: str) -> Kind:
    """Return the kind of some words."""
    what = f"one of {', '.join(map(repr, names))}"

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not {what}")
        return text

    return Kind("|".join(names), what, read)


def read_step_range(text: str) -> StepRange:
    """Read ``A:B``, either of them optional.

    Raises:
        ValueError: it is no such range, or no step lies in it.
    """
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None or text == ":":
        raise ValueError(f"{text!r} is not A:B, as in 100:200, 100: or :200")
    first, end = (int(number) if number else None for number in match.groups())
    if end is not None and end <= (first or 0):
        raise ValueError(f"no step lies in {text}; A:B is A up to, not including, B")
    return first, end


def _read_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size, as in 500MB or 1GiB")
    size = float(match[1]) * _UNITS[match[2]]
    if math.isinf(size):
        raise ValueError(f"{text!r} is too large a size")
    return int(size)


def _read_truth(text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise ValueError(f"{text!r} is not true or false")
    return _TRUTH[text.lower()]


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


STEPS = Kind("A:B", "a range of steps, as in '100:200'", read_step_range)
SIZE = Kind("SIZE", "a size, as in '500MB'", _read_size, (int,))
TRUTH = Kind("", "true or false", _read_truth, (bool,))
GLOBS = ListKind("GLOB", "a list of strings", _read_list)
PATH = Kind("RUN", "a path", str)
