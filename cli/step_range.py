"""Ranges of steps on the command line: ``A:B`` is A up to, not including, B."""

from __future__ import annotations

from gradtrace.setting_kinds import STEPS

from .reading import reading

read_step_range = reading(STEPS.read)
