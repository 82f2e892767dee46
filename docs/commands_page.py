"""The generated part of commands.md: what ``--help`` says of every command, as on a terminal of 80 columns."""

from __future__ import annotations

import re

import click
from gradtrace_cli.main import cli

_WIDTH = 78
"""Columns of text that click uses of a terminal with 80."""


def page(text: str) -> str:
    """Return the page's text with the help of every command made anew.

    Raises:
        ValueError: the text lacks the marks of that part.
    """
    part = re.compile(r"(<!-- generated: commands -->\n).*?(<!-- end of commands -->\n)", flags=re.DOTALL)
    body = "\n".join(_section(context) for context in _contexts())
    text, count = part.subn(lambda marks: f"{marks[1]}\n{body}\n{marks[2]}", text)
    if count != 1:
        raise ValueError(f"the page has {count} parts with the commands; it is to have one")
    return text


def _contexts() -> list[click.Context]:
    top = click.Context(cli, info_name="gradtrace", terminal_width=_WIDTH, **cli.context_settings)
    contexts = [top]
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        assert command is not None
        contexts.append(click.Context(command, info_name=name, parent=top, **command.context_settings))
    return contexts


def _section(context: click.Context) -> str:
    help_ = "\n".join(line.rstrip() for line in context.command.get_help(context).splitlines())
    return f"## {context.command_path}\n\n```text\n{help_}\n```\n"
