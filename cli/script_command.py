"""Commands that run a script: what stands after SCRIPT is the script's own, for shell completion, too."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class ScriptCommand(click.Command):
    """A command with an argument ``script``, after which none of its own options are offered."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what may stand in place of an incomplete word: files after SCRIPT, options before it."""
        if ctx.params.get("script") is not None:
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)
