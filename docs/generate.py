"""Writes the generated parts of the pages beside it: ``make docs``. A test compares the pages with what this makes.

What is written by hand on them stays.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).parent

PARTLY = {"columns.md": "columns_page", "commands.md": "commands_page"}
"""Pages with generated parts, and the file of this folder whose ``page(text)`` makes these anew."""

WHOLLY = {"rules.md": "rules_page", "soak.md": "soak_page", "soak.svg": "soak_plot"}
"""Pages that are generated altogether, and the file of this folder whose ``page()`` returns the text."""

PAGES = PARTLY | WHOLLY


def make(page: str, text: str) -> str:
    """Return a page made anew from the text that it has."""
    name = PAGES[page]
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: str = module.page(text) if page in PARTLY else module.page()
    return made


def main() -> None:
    """Write every page whose generated parts are not up to date."""
    for page in PAGES:
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        made = make(page, text)
        if made != text:
            path.write_text(made, encoding="utf-8")
            sys.stdout.write(f"docs/{page} is new\n")


if __name__ == "__main__":
    main()
