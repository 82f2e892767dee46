"""Ranges of steps on the command line: ``A:B`` is A up to, not including, B."""

from __future__ import annotations

import re

import click


def read_step_range(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int | None, int | None] | None:
    """Read ``A:B``, either of them optional; a click callback.

    Raises:
        click.BadParameter: it is no such range, or no step lies in it.
    """
    if value is None:
        return None
    match = re.fullmatch(r"(\d*):(\d*)", value)
    if match is None or value == ":":
        raise click.BadParameter(f"{value!r} is not A:B, as in 100:200, 100: or :200", ctx, param)
    first, end = (int(text) if text else None for text in match.groups())
    if end is not None and end <= (first or 0):
        raise click.BadParameter(f"no step lies in {value}; A:B is A up to, not including, B", ctx, param)
    return first, end
