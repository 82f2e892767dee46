"""The pieces of an unfinished run: where they stand and what they are called.

Piece number i is ``part-i.parquet`` once it is encoded and ``journal-i.arrow`` until then; both exist for a
moment, and then the part counts. ``part-i-j.parquet`` holds pieces i to j in one, and counts before any of them.
Files that end in ``.tmp`` are not finished and belong to nobody. How the pieces become one file is in ``merging.py``.
"""

from __future__ import annotations

from pathlib import Path

INFO_FILE = "run.json"


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


def pieces(directory: Path) -> list[Path]:
    """Return the files that hold the run's rows, in order, each row once."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(directory.iterdir()):  # journals before parts
        kind, _, numbers = path.stem.partition("-")
        if (kind, path.suffix) in (("journal", ".arrow"), ("part", ".parquet")):
            start, _, stop = numbers.partition("-")
            found[int(start), int(stop or start)] = path
    kept: list[Path] = []
    end = -1
    for first, last in sorted(found, key=lambda numbers: (numbers[0], -numbers[1])):
        if first > end:  # else it was put into the piece before, and is about to be removed
            kept.append(found[first, last])
            end = last
    return kept
