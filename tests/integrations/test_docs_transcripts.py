"""Whoever does what the quick start says sees what it shows: its script, its commands and its mend, in their order."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.documentation import DOCS, Block, blocks
from tests.terminal import differences, run

QUICK_START = blocks(DOCS / "quick-start.md")


def test_the_quick_start_is_what_one_sees_who_does_what_it_says(tmp_path: Path) -> None:
    done = []
    for block, after in zip(QUICK_START, [*QUICK_START[1:], Block("", "", "")], strict=True):
        if block.language == "python":
            (tmp_path / "train.py").write_text(block.text)
        elif block.language == "diff":
            _patch(tmp_path / "train.py", block.text)
        elif block.language == "sh":
            lines = block.text.splitlines()
            seen = "".join(run(line, tmp_path) for line in lines)
            assert "gradtrace: error" not in seen
            if after.language == "text":
                assert differences(after.text, seen) == []
            done += [line.split()[1] for line in lines]
    assert done[:3] == ["record", "first-nan", "recheck"]


def test_the_quick_start_has_no_block_that_the_test_above_passes_over() -> None:
    languages = [block.language for block in QUICK_START]
    assert set(languages) == {"python", "diff", "sh", "text"}
    assert languages.count("python") == 1
    shown = [before for before, language in itertools.pairwise(languages) if language == "text"]
    assert set(shown) == {"sh"}, "what is shown is that of the commands just before"


def _patch(script: Path, diff: str) -> None:
    """Put the line with + in the place of the line with -."""
    old, new = (line[1:] for line in diff.splitlines())
    text = script.read_text()
    assert text.count(f"{old}\n") == 1
    script.write_text(text.replace(old, new))
