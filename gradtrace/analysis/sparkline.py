"""A series of numbers as a line of blocks, one character each. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], blocks: str = BLOCKS) -> str:
    """Return one of ``blocks``, lowest first, for each value on a logarithmic scale.

    ``!`` marks a value that is not finite, a blank one that is None.
    """
    known = [math.log10(value) for value in values if value and 0 < value < math.inf]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0

    def mark(value: float | None) -> str:
        if value is None:
            return " "
        if not math.isfinite(value):
            return "!"
        return blocks[round((math.log10(value) - low) * scale)] if value > 0 else blocks[0]

    return "".join(mark(value) for value in values)
