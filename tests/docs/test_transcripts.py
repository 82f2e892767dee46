"""What the README shows of a terminal is what a terminal shows."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.documentation import README, ROOT, blocks_of
from tests.terminal import differences, run, session


def test_the_readme_shows_what_the_example_gives(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shown = [part for text in blocks_of(README, "text") if text.startswith("$ ") for part in session(text)]
    assert [part.command.split()[1] for part in shown] == ["record", "first-nan"]
    for command, output in shown:
        assert differences(output, run(command, tmp_path)) == []
