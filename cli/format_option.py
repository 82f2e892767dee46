"""The option that says in which form a table goes out: the same in every command that has one."""

from __future__ import annotations

import click

from .output import FORMATS

format_option = click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    metavar="NAME",
    help="table, csv, json, jsonl or markdown.",
)
