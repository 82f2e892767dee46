"""Options that choose a part of a recording: the same in every command that has them."""

from __future__ import annotations

import click

from gradtrace.setting_kinds import STEPS

from .reading import reading

steps_option = click.option(
    "--steps", callback=reading(STEPS.read), metavar="A:B", help="Only steps A up to, not including, B."
)
rank_option = click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only rank N.")
