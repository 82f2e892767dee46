"""Sizes on the command line: a number of bytes, or with a unit as in ``500MB`` and ``1GiB``."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def read_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Return a size in bytes; a click callback.

    Raises:
        click.BadParameter: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"{value!r} is no size, as in 500MB or 1GiB", ctx, param)
    return int(float(match[1]) * _UNITS[match[2]])
