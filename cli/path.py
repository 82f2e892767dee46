"""Arguments that are paths, so that shells complete them. Whether one is there and can be read, its reader says."""

from __future__ import annotations

import click

PATH = click.Path(readable=False)
