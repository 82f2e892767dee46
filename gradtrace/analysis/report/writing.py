"""The page as text, and as a file that is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gradtrace.analysis.recording import answers
from gradtrace.analysis.report.grid import Bounds, Selection
from gradtrace.analysis.report.page import Contents, collect, plotly_script, render

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording


@answers
def report_html(
    run: Recording,
    *,
    title: str | None = None,
    steps: Bounds | None = None,
    rank: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[str, Contents]:
    """Return the page, and what it shows.

    ``title`` is by default the name of the run's file. ``steps`` limits the page to steps from the first up to, not
    including, the second; ``rank`` to one process. ``progress`` is told the share that is done.

    Raises:
        MissingPackageError: plotly is not installed.
        NoMatchError: the run has no such step or rank.
    """
    plotly = plotly_script()
    found = collect(run, Selection(steps or (None, None), rank), progress or (lambda share: None))
    return render(run, found, plotly, title), found


@answers
def write_report(
    run: Recording,
    output: str | os.PathLike[str],
    *,
    title: str | None = None,
    steps: Bounds | None = None,
    rank: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Contents:
    """Write the page to ``output``, in place of a file that is there; return what it shows. See ``report_html``.

    Raises:
        MissingPackageError: plotly is not installed.
        NoMatchError: the run has no such step or rank.
        OSError: the file cannot be written; what was there before is untouched.
    """
    page, found = report_html(run, title=title, steps=steps, rank=rank, progress=progress)
    put(page, Path(output))
    return found


def put(text: str, path: Path) -> None:
    """Write text to a file beside ``path``, then give it that name.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    try:
        _put(text, path)
    except OSError as error:
        if error.errno is not None:  # a full disk names no file, others the temporary one
            error.filename = os.fspath(path)
        raise


def _put(text: str, path: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
