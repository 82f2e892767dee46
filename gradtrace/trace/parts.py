"""The pieces of an unfinished run: where they stand and what they are called.

Piece number i is ``part-i.parquet`` once it is encoded and ``journal-i.arrow`` until then; both exist for a
moment, and then the part counts. Files that end in ``.tmp`` are not finished and belong to nobody. How the pieces
become one file is in ``merging.py``.
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


def pieces(directory: Path) -> list[Path]:
    """Return the files that hold the run's rows, in order, each row once."""
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):  # journals before parts
        kind, _, rest = path.name.partition("-")
        if (kind, path.suffix) in (("journal", ".arrow"), ("part", ".parquet")):
            found[rest.partition(".")[0]] = path
    return [found[index] for index in sorted(found)]
