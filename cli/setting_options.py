"""The settings as options of ``record``, and help that lists options in sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gradtrace.setting_kinds import GLOBS, TRUTH
from gradtrace.settings import SETTINGS

from .reading import reading
from .script_command import ScriptCommand

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def setting_option(key: str) -> Decorator:
    """Return the decorator that adds the option of a setting; None or nothing is what it gives where it is left out."""
    setting = SETTINGS[key]
    help_ = f"{setting.meaning} [default: {setting.shown}]"
    if setting.kind is TRUTH:
        return click.option(f"{setting.option}/--no-{setting.option[2:]}", key, default=None, help=help_)
    if setting.kind is GLOBS:
        help_ = f"{setting.meaning} Repeatable. [default: {setting.shown}]"
        return click.option(setting.option, key, multiple=True, metavar=setting.kind.metavar, help=help_)
    return click.option(
        setting.option, key, callback=reading(setting.kind.read), metavar=setting.kind.metavar, help=help_
    )


class SectionedCommand(ScriptCommand):
    """A command that runs a script and whose help has its options in sections.

    ``sections`` maps a title to the names of parameters; the others stand under "Options", ahead of them.
    """

    def __init__(self, *args: Any, sections: dict[str, tuple[str, ...]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that are to be shown, a section after the other."""
        titles = {name: title for title, names in self._sections.items() for name in names}
        for title in ("Options", *self._sections):
            params = [param for param in self.get_params(ctx) if titles.get(param.name or "", "Options") == title]
            options = [param for param in params if isinstance(param, click.Option)]
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)
