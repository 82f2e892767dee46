"""A recording that somebody hostile has written: its texts try something on a terminal, a shell, a page or SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace.trace.confirmation import SourceLine
from gradtrace.trace.runinfo import ModuleInfo
from tests.analysis.rows import NAN, Rows
from tests.traces import write_run

ESCAPES = "\x1b[2J\x1b]8;;http://evil\x07\x1b]52;c;cm0=\x07\x9b31m\x1b[1A\x1b[2K"
"""Clear the screen, open a link, fill the clipboard, colour the rest, overwrite the line above."""
LINES = "a\nb\r\nc\rd\te\x0bf\x0cg\x1ch\x85i\u2028j\u2029k"
DIRECTIONS = "\u202egpj.exe\u2066\u200f\u200b\u200d\ufeff\xad"
PAGE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=2>&amp;]]>{{7*7}}${window.broken=3}"
ALL = f"x{ESCAPES}{LINES}\0\x7f{DIRECTIONS}{PAGE}'\"\\`|*_[red]b[/red]](javascript:alert(1))%s%n{{0}}"
"""One name that tries all at once."""
FORMULA = "=cmd|' /C calc'!A0"
INJECTION = "x'; DROP TABLE records; --"
COMMAND = "$(touch pwned); `touch pwned` && touch pwned"
LONG = "long." * 20_000
NAMES = (
    ALL, ESCAPES, LINES, DIRECTIONS, PAGE, FORMULA, INJECTION, COMMAND, LONG,
    "(root)", "outside any module", "-", "NULL", "a", "A", "\xe9", "e\u0301", "\N{FAMILY}\N{ZERO WIDTH JOINER}\N{FIRE}",
    "z\u0301\u0302\u0303", "\u65e5\u672c", " ", "a.b", "a..b", ".", "-rf", "--force", "a,b;c", '"quoted"', "\\", "\0",
)  # fmt: skip


def write_hostile_run(path: Path, *, names: tuple[str, ...] = NAMES, scale: float = 1.0, **info: Any) -> Path:
    """Write three healthy steps and one in which the first of ``names`` makes a NaN, which a replay confirms."""
    rows = Rows()
    last = 3
    for step in range(last + 1):
        rows.step = step
        _add_step(rows, names, scale, bad=step == last)
    frames = (SourceLine(f"{ALL}.py", 3, ALL, ALL), SourceLine(f"{ESCAPES}.py", 4, LINES, PAGE))
    rows.birth(f"aten.{ALL}", names[0], traceback=frames, operands=[("input", ALL, {"min": 0.0})])
    rows.replay("reproduced", anomaly_op=ALL, anomaly_message=ALL, term=f"term {ALL}")
    nothing = dict.fromkeys(
        ("numel", "nan_count", "posinf_count", "neginf_count", "min", "max", "norm", "dtype", "shape")
    )
    for event in ("skip", "incident", "switch", "stop", "lost"):
        rows.add("event", None, event, "", detail=f"{event} {ALL}", **nothing)
    modules = [ModuleInfo("", ALL, root=True, file=ALL, line=1)]
    modules += [
        ModuleInfo(name, name[:5_000] or "Net", depth=1, file=name, line=2, parameters={ALL: "[2, 2]"}, calls=last + 1)
        for name in names
    ]
    facts: dict[str, Any] = {
        "modules": modules,
        "command": [f"{ALL}.py", ESCAPES, COMMAND, "\udcff\ud800"],
        "versions": {ALL: ESCAPES},
        "config": {"include": [ALL], ALL: LINES},
        "gradtrace_version": ESCAPES,
        "started": ESCAPES,
        "end": f"exception {ALL}",
        "unmeasured": {ALL: 2},
        "notes": [ALL],
    }
    return write_run(path, rows.records, **(facts | info))


def _add_step(rows: Rows, names: tuple[str, ...], scale: float, *, bad: bool) -> None:
    rows.add("input", "", "input", ALL)
    for place, name in enumerate(names):
        rows.add("forward", name, "input", "0")
        values = NAN if bad else {"min": -scale, "max": scale, "norm": 2 * scale}
        rows.add("forward", name, "output", ALL, device=ESCAPES, **values)
        if not place:
            rows.add("backward", name, "grad", ALL, **(NAN if bad else {}))
            rows.add("optimizer", name, "param", ALL, **(NAN if bad else {}))
    rows.add("forward", "", "output", **(NAN if bad else {}))
    rows.scalar("loss", "loss", None if bad else 1.0, **(NAN if bad else {}))
    rows.scalar("optimizer", "lr", 0.1, ALL)
