"""What the comparison of a page with a terminal lets pass, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documentation import write_recording
from tests.terminal import Shown, differences, run, session


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        ("wrote run.parquet: 60 steps, 63.8 kB", "wrote run.parquet: 60 steps, 1 MB"),
        ("(45.3 KiB)", "(46 KiB)"),
        ("loss 0.3760", "loss 0.3761"),
        ("max   -0.01418", "max -0.014"),
        ("norm 2.5 and 3.0", "norm 2.55 and 3"),
        ("----------\na   1.5", "--------\na  1.52"),
    ],
)
def test_what_depends_on_the_machine_may_differ(shown: str, seen: str) -> None:
    assert differences(shown, seen) == []


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        ("step 51", "step 52"),
        ("60 steps", "61 steps"),
        ("loss 0.3760", "loss nan"),
        ("loss 1.5", "loss 1.9"),
        ("1.5", "-1.5"),
        ("SqrtBackward0 (inf)", "SqrtBackward0 (-inf)"),
        ("train.py:19", "train.py:20"),
        ("a", "a\nb"),
        ("a\nb", "a"),
    ],
)
def test_nothing_else_may(shown: str, seen: str) -> None:
    assert differences(shown, seen)


def test_a_session_is_commands_with_what_they_show() -> None:
    assert session("$ gradtrace sql a b\none\n\ntwo\n$ gradtrace check\n") == [
        Shown("gradtrace sql a b", "one\n\ntwo\n"),
        Shown("gradtrace check", ""),
    ]


def test_a_terminal_shows_output_and_errors(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.parquet")
    assert run("gradtrace sql run.parquet 'SELECT max(step) AS last FROM steps'  # the last", tmp_path) == (
        "last\n----\n   3\n"
    )
    assert run("gradtrace sql none.parquet 'SELECT 1'", tmp_path) == "gradtrace: error: no such file: none.parquet\n"
