"""The pages of the documentation as tests need them: their blocks, and a recording for their examples to ask."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from gradtrace.trace.confirmation import Confirmation
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record
from tests.traces import write_run

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted([README, ROOT / "CHANGELOG.md", *DOCS.glob("*.md")])

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block and the line of text before it."""

    language: str
    text: str
    before: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCED.finditer(text):
        before = text[: match.start()].strip().rpartition("\n")[2]
        found.append(Block(match[1], match[2], before))
    return found


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the texts of a page's blocks in one language, in order."""
    return [block.text for block in blocks(page) if block.language == language]


def table(page: Path, header: str) -> list[list[str]]:
    """Return the cells of the first table that has this header, a list for each of its rows."""
    text = page.read_text(encoding="utf-8")
    assert f"\n{header}\n" in text, f"{page.name} has no table {header}"
    body = text.partition(f"\n{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [line for line in body if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]


def _tensor(step: int, seq: int, tensor: str, phase: str, module: str | None, **values: object) -> Record:
    facts = {"numel": 4, "nan_count": 0, "posinf_count": 0, "neginf_count": 0, "dtype": "float32"}
    facts |= {"min": -1.0, "max": 1.0, "norm": 2.0, "shape": "[4]", "device": "cpu", "call": 0}
    return Record(step=step, seq=seq, phase=phase, tensor=tensor, module=module, **(facts | values))  # type: ignore[arg-type]


def _step(step: int, bad: int) -> list[Record]:
    """One step of a model that grows by a factor of a hundred a step and makes ``bad`` NaN."""
    scale = 100.0**step
    rows = (
        ("input", "input", "", {"path": "tokens", "dtype": "int64", "max": 60000.0, "norm": None}),
        ("input", "forward", "layer", {"path": "0"}),
        (
            "output",
            "forward",
            "layer",
            {"path": "", "max": 10 * scale, "nan_count": bad, "dtype": "float16"},
        ),
        ("output", "forward", "", {"path": "logits", "nan_count": bad}),
        ("loss", "loss", None, {"numel": 1, "max": scale}),
        ("grad", "backward", "layer", {"path": "weight", "norm": scale, "nan_count": bad}),
        ("lr", "optimizer", None, {"path": "0.0", "max": 0.1}),
        ("param", "optimizer", "layer", {"path": "weight", "nan_count": bad}),
        ("param", "optimizer", "layer", {"path": "bias"}),
    )
    first = len(rows) * step
    return [
        _tensor(step, first + number, tensor, phase, module, **values)
        for number, (tensor, phase, module, values) in enumerate(rows)
    ]


def _operations(step: int, first: int) -> list[Record]:
    """What --op-steps and a replay leave of one step."""
    layer = {"op": "DivBackward0", "file": "net.py", "line": 7}
    return [
        _tensor(step, first, "output", "forward", "layer", path="0", nan_count=2, **layer),
        _tensor(step, first + 1, "input", "replay", "layer", path="other", min=0.0, **layer),
        _tensor(step, first + 2, "output", "replay", "layer", path="0", nan_count=2, detail="{}", **layer),
        _tensor(step, first + 3, "replay", "event", None, detail=Confirmation("reproduced").to_json()),
    ]


def write_recording(path: Path, *, healthy: bool = False) -> Path:
    """Write a run of four steps in which every query of the cookbook has something to find.

    A NaN is made in step 2, unless the run is to be ``healthy``.
    """
    modules = [
        ModuleInfo("", "Net", root=True, calls=4),
        ModuleInfo("layer", "Linear", depth=1, parameters={"weight": "[2, 2]", "bias": "[2]"}, calls=4),
        ModuleInfo("spare", "Dropout", depth=1),
    ]
    records = [record for step in range(4) for record in _step(step, bad=2 * (step == 2 and not healthy))]
    made = [] if healthy else _operations(2, len(records))
    return write_run(path, records + made, modules=modules, command=["train.py"])
