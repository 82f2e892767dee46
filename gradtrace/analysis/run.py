"""``Run``: a recording with the questions that one asks of it, each a method. The answers come from their own rooms."""

from __future__ import annotations

import os

from gradtrace.analysis import verdict
from gradtrace.analysis.recording import Recording
from gradtrace.analysis.verdict_model import Verdict


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a recording, be it finished, killed, or still being recorded.

    ``path`` is a file, the directory of several ranks, the ``.parts`` directory of an unfinished run, a glob
    pattern, or the name that an unfinished run will have.

    Raises:
        RunNotFoundError: there is nothing at ``path``.
        NotARunError: what is there is no run that this gradtrace can read.
    """
    return Run(path)


class Run(Recording):
    """A recording that answers questions. Close it, or use it as a context manager."""

    def first_nan(
        self,
        *,
        incident: int | None = None,
        steps: tuple[int | None, int | None] | None = None,
        rank: int | None = None,
        context: int = 5,
        skipped: bool = False,
    ) -> Verdict:
        """Name the first non-finite boundary of an incident and what made it; see ``gradtrace first-nan``.

        ``incident`` counts from 1; by default the incident that never ended is taken, else the first. ``steps``
        limits the search to steps from the first up to, not including, the second; ``rank`` to one process.
        ``context`` is the number of records shown that came before. With ``skipped`` steps that GradScaler skipped
        are the incidents: what made their gradients overflow is named.

        Raises:
            NoMatchError: the run has no such incident, step or rank.
        """
        return verdict.first_nan(self, incident=incident, steps=steps, rank=rank, context=context, skipped=skipped)
