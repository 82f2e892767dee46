"""``Run``: a recording with the questions that one asks of it, each a method. The answers come from their own rooms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrace.analysis import summary, verdict
from gradtrace.analysis.check import check
from gradtrace.analysis.check.model import Checkup
from gradtrace.analysis.compare import compare
from gradtrace.analysis.compare.model import Difference
from gradtrace.analysis.recording import Recording
from gradtrace.analysis.report import write_report
from gradtrace.analysis.summary_model import By, Summary
from gradtrace.analysis.tabular import counted
from gradtrace.analysis.verdict_model import Verdict
from gradtrace.printable import html_words, printable


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

    def summary(self, by: By = "module", depth: int | None = None) -> Summary:
        """Return norms over time, extremes and counts of NaN and Inf; see ``gradtrace summary``.

        ``by`` says what makes a line: "module", "type" (all modules of a type) or "step".
        ``depth`` folds modules that lie deeper below their root into those above them.

        Raises:
            NoMatchError: there is no summary by that, or none with a depth.
        """
        return summary.summarize(self, by, depth)

    def check(
        self,
        *,
        rules: Sequence[str] = (),
        thresholds: Mapping[str, float] | None = None,
        steps: tuple[int | None, int | None] | None = None,
        rank: int | None = None,
    ) -> Checkup:
        """Look for what precedes a NaN or wastes a run; see ``gradtrace check``.

        ``rules`` are names, by default of all; ``thresholds`` maps ``RULE.THRESHOLD`` to another value. ``steps``
        limits what is looked at to steps from the first up to, not including, the second; ``rank`` to one process.

        Raises:
            NoMatchError: there is no such rule, threshold, step or rank.
        """
        return check.check(self, rules=rules, thresholds=thresholds, steps=steps, rank=rank)

    def report(self, output: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Write the run as one HTML file that opens without a network, and return its path; see ``gradtrace report``.

        A file that is there is replaced. ``title`` is by default the name of the run's file.

        Raises:
            MissingPackageError: plotly is not installed.
            OSError: the file cannot be written.
        """
        write_report(self, output, title=title)
        return Path(output)

    def diff(
        self,
        other: Recording | str | os.PathLike[str],
        *,
        rtol: float | None = None,
        steps: tuple[int | None, int | None] | None = None,
    ) -> Difference:
        """Return where this run and another, or the one at a path, part ways; see ``gradtrace diff``.

        ``rtol`` is the relative difference that counts, by default one for each dtype. ``steps`` limits the comparison
        to steps from the first up to, not including, the second.

        Raises:
            NoMatchError: the runs have no step or boundary in common.
            RunNotFoundError: there is nothing at the path.
            NotARunError: what is there is no run that this gradtrace can read.
        """
        if isinstance(other, Recording):
            return compare.compare(self, other, rtol=rtol, steps=steps)
        with Recording(other) as opened:
            return compare.compare(self, opened, rtol=rtol, steps=steps)

    def __repr__(self) -> str:
        ranks = f", {len(self.infos)} ranks" if len(self.infos) > 1 else ""
        return printable(f"<Run {self.path!r}: {counted(self.steps, 'step')}{ranks}, {self.end}>")

    def _repr_html_(self) -> str:
        command = f"<br><code>{html_words(' '.join(self.info.command))}</code>" if self.info.command else ""
        notes = "".join(f"<br>note: {html_words(note)}" for note in self.missing)
        facts = html_words(summary.facts(self, self.captured))
        return f"<p><b>{html_words(self.path)}</b>{command}<br>{facts}{notes}</p>"
