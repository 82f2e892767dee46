"""Options whose text has a reader of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Callback = Callable[[click.Context, click.Parameter, Any], Any]


def reading(read: Callable[[str], Any]) -> Callback:
    """Return the click callback that reads an option's text; the ValueError of ``read`` says what is wrong with it."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return callback
