"""All of soak.svg: how memory, the cost of a step and the disk went in the long runs, drawn from what they measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent.parent / "tests" / "soak" / "results"

_COLUMNS = [("resident_MiB", "resident memory, MiB"), ("step_ms", "median step, ms"), ("disk_MB", "on disk, MB")]
_WIDTH, _HEIGHT = 250, 90
_LEFT, _TOP, _APART, _BETWEEN = 50, 40, 310, 140
_STYLE = "text { font: 11px sans-serif; fill: #333 } .t { font-size: 13px } .e { text-anchor: end }"


def page() -> str:
    """Return the whole picture."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    runs = [(result["test"].partition("::")[2], result["numbers"]["series"]) for result in results if _has(result)]
    width, height = _LEFT + _APART * len(_COLUMNS), _TOP + _BETWEEN * len(runs)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for row, (name, series) in enumerate(runs):
        top = _TOP + _BETWEEN * row
        lines.append(f'<text class="t" x="8" y="{top - 22}">{escape(name)}</text>')
        for column, (key, title) in enumerate(_COLUMNS):
            lines += _panel(_LEFT + _APART * column, top, title, series["step"], series[key])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _has(result: dict[str, dict[str, object]]) -> bool:
    series = result["numbers"].get("series")
    return isinstance(series, dict) and all(key in series for key in ("step", *dict(_COLUMNS)))


def _panel(left: int, top: int, title: str, steps: Sequence[float], values: Sequence[float]) -> Iterator[str]:
    """Draw one quantity over the steps, its axis from 0."""
    highest = max(values) * 1.1 or 1
    points = " ".join(
        f"{left + _WIDTH * step / steps[-1]:.1f},{top + _HEIGHT * (1 - value / highest):.1f}"
        for step, value in zip(steps, values, strict=True)
    )
    bottom = top + _HEIGHT
    yield f'<text x="{left}" y="{top - 6}">{escape(title)}</text>'
    yield f'<path d="M{left},{top} V{bottom} H{left + _WIDTH}" fill="none" stroke="#999"/>'
    yield f'<polyline points="{points}" fill="none" stroke="#1668a8" stroke-width="1.5"/>'
    yield f'<text class="e" x="{left - 4}" y="{top + 8}">{highest:.3g}</text>'
    yield f'<text class="e" x="{left - 4}" y="{bottom}">0</text>'
    yield f'<text class="e" x="{left + _WIDTH}" y="{bottom + 13}">step {steps[-1]:,.0f}</text>'
