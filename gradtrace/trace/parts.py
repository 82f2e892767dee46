"""The pieces of an unfinished run: where they stand and what they are called.

Piece number i is ``part-i.parquet`` once it is encoded and ``journal-i.arrow`` until then; both exist for a
moment, and then the part counts. ``journal-i.crc`` has the checksums of a journal. ``part-i-j.parquet`` holds pieces
i to j in one, and counts before any of them. Files that end in ``.tmp`` are not finished and belong to nobody. How the
pieces become one file is in ``merging.py``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

INFO_FILE = "run.json"

MERGED_FILE = "merged.parquet.tmp"
"""What all pieces are merged into; then it takes the place of the finished file."""

LAUNCH_FILE = "_launch.json"
"""In the directory of several ranks: which launch it belongs to, and where an older run was moved.

With a leading underscore engines that read a whole directory pass it over.
"""

_PIECE = re.compile(
    r"journal-(?P<journal>\d{6,12})\.arrow|part-(?P<first>\d{6,12})(-(?P<last>\d{6,12}))?\.parquet", re.ASCII
)


def parts_of(path: Path) -> Path:
    """Return the directory that holds the pieces while ``path`` is being recorded."""
    return path.with_name(path.name + ".parts")


def journal_file(directory: Path, index: int) -> Path:
    """Return where piece ``index`` stands until it is encoded."""
    return directory / f"journal-{index:06d}.arrow"


def part_of(journal: Path) -> Path:
    """Return where a journal's rows stand once they are encoded."""
    return journal.with_name(journal.stem.replace("journal", "part") + ".parquet")


def joined_part(directory: Path, first: int, last: int) -> Path:
    """Return where pieces ``first`` to ``last`` stand once they are one."""
    return directory / f"part-{first:06d}-{last:06d}.parquet"


def numbers_of(piece: Path) -> tuple[int, int] | None:
    """Return the numbers of the first and the last piece that a file holds, None for a file that is no piece."""
    match = _PIECE.fullmatch(piece.name)
    if match is None:
        return None
    first = int(match["journal"] or match["first"])
    return first, int(match["last"] or first)


def pieces(directory: Path) -> list[Path]:
    """Return the files that hold the run's rows, in order, each row once."""
    return chosen(directory.iterdir(), lambda piece: True)


def chosen(files: Iterable[Path], is_usable: Callable[[Path], bool]) -> list[Path]:
    """Return those of the files that hold the run's rows, in order, each row once.

    Of several that hold the same rows the one that counts first is taken, if it ``is_usable``, which is asked in order.
    """
    found = [(numbers, path) for path in files if (numbers := numbers_of(path)) is not None]
    # What was put into a piece before is about to be removed; of a journal and its part, the part is first.
    found.sort(key=lambda one: (one[0][0], -one[0][1], one[1].suffix == ".arrow"))
    kept: list[Path] = []
    end = -1
    for (first, last), path in found:
        if end < first <= last and is_usable(path):
            kept.append(path)
            end = last
    return kept


def remove_parts(directory: Path) -> None:
    """Remove the pieces of a finished file and their directory; the facts go last, as they say what the others are.

    Raises:
        OSError: something cannot be removed.
    """
    info = directory / INFO_FILE
    for path in directory.iterdir():
        if path != info:
            path.unlink(missing_ok=True)
    info.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()
