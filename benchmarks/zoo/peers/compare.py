"""Asks every peer about every case, scores the answers as gradtrace's are scored, and writes them down.

The result says on which machine, when and with which versions: the numbers are what they were there.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.zoo.cases import GROUPS, Case
from benchmarks.zoo.score import FIELDS, Marks, score
from benchmarks.zoo.table import markdown

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
RESULTS = Path(__file__).parents[1] / "results"

# What each peer reports of a failure; the rest is not told, and not scored.
REPORTS = {
    "anomaly": ("step", "op", "line"),
    "underflow": ("step", "module"),
    "lens": ("step", "phase", "module", "op", "line"),
    "probe": ("step", "phase", "module", "op", "line"),
}
NAMES = {
    "anomaly": "torch.autograd.detect_anomaly",
    "underflow": "transformers DebugUnderflowOverflow",
    "lens": "torchlens",
    "probe": "msprobe (mindstudio-probe)",
}
VERSIONS = ("torch", "transformers", "torchlens", "mindstudio-probe")

Answers = dict[str, dict[str, Any]]


def main(cases: Sequence[Case], file: Path | None = None) -> int:
    """Ask all peers, print their table and write both forms of it; return the exit code."""
    if not PYTHON.exists():
        print(f"benchmarks.zoo: error: {PYTHON} is missing; make it: make peers", file=sys.stderr)
        return 2
    result = facts() | judged({peer: ask(peer, cases) for peer in REPORTS}, cases)
    written = file or RESULTS / "peers.json"
    written.write_text(json.dumps(result, indent=1) + "\n")
    written.with_suffix(".md").write_text(report(result))
    print(report(result))
    return 0


def ask(peer: str, cases: Sequence[Case]) -> Answers:
    """Return the peer's answer to each case, by id."""
    scripts = [str(case.script) for case in cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = (str(PYTHON), "-m", "benchmarks.zoo.peers.run", peer, folder, *scripts)
        subprocess.run(command, cwd=folder, env=environment, check=True)
        return read(Path(folder))


def read(folder: Path) -> Answers:
    """Return the answers that ``run`` left in the folder, by case."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def judged(answers: dict[str, Answers], cases: Sequence[Case]) -> dict[str, Any]:
    """Return every peer's answers with their marks."""
    peers: dict[str, Any] = {}
    for peer, said in answers.items():
        peers[peer] = [
            {"id": case.id, "group": case.group, "marks": _marks(case, said[case.id], REPORTS[peer])}
            | _portable(said[case.id])
            for case in cases
        ]
    return peers


def _portable(said: dict[str, Any]) -> dict[str, Any]:
    """Return the answer without the folders of the machine that gave it."""
    location = said.get("location")
    return said | ({"location": location | {"file": Path(location["file"]).name}} if location else {})


def facts() -> dict[str, Any]:
    """Return where and when it is measured, and the versions in the peers' environment."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {VERSIONS}}}))"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return {"machine": machine, "date": date, "versions": json.loads(done.stdout)}


def _marks(case: Case, said: dict[str, Any], fields: tuple[str, ...]) -> Marks:
    """Return the marks of the answer, or those of its other reading (``or``) where that fits better."""
    marks = [score(case, answer, fields) for answer in (said, said | said.get("or", {}))]
    return max(marks, key=lambda mark: sum(right is True for right in mark.values()))


def report(result: dict[str, Any]) -> str:
    """Return the Markdown page: right answers of those that count, and what crashed or kept silent."""
    head = ("", "cases", *FIELDS, "quiet when healthy", "crashed", "silent on a failure")
    rows = [head, *(_row(result[peer], peer, group) for peer in REPORTS for group in GROUPS)]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# What other tools say of the zoo",
        f"{result['date']}, {result['machine']}; {versions}. Made by `python -m benchmarks.zoo --peers`.",
        "Right answers of those that count; a field that a tool does not report is empty. "
        "A tool that crashed or found nothing has every field wrong.",
        markdown(rows),
        *(f"{NAMES[peer]}: {_troubles(result[peer])}" for peer in REPORTS if _troubles(result[peer])),
    ]
    return "\n\n".join(lines) + "\n"


def _row(answers: Iterable[dict[str, Any]], peer: str, group: str) -> tuple[str, ...]:
    mine = [answer for answer in answers if answer["group"] == group]
    failing = [answer for answer in mine if "quiet" not in answer["marks"]]
    crashed = [answer for answer in mine if _crashed(answer)]
    silent = [answer for answer in mine if _silent(answer)]
    fields = (_count(answer["marks"].get(field) for answer in failing) for field in FIELDS)
    quiet = _count(answer["marks"]["quiet"] and not _crashed(answer) for answer in mine if "quiet" in answer["marks"])
    return (NAMES[peer], group, *fields, quiet, str(len(crashed)), str(len(silent)))


def _crashed(answer: dict[str, Any]) -> bool:
    return str(answer.get("note", "")).startswith("crashed")


def _count(marks: Iterable[bool | None]) -> str:
    counted = [mark for mark in marks if mark is not None]
    return f"{sum(counted)} of {len(counted)}" if counted else ""


def _silent(answer: dict[str, Any]) -> bool:
    """Whether the tool found nothing in a run that fails."""
    return "quiet" not in answer["marks"] and not answer["found"] and not _crashed(answer)


def _troubles(answers: Sequence[dict[str, Any]]) -> str:
    """Return in which cases the tool crashed, and in which it kept silent on a failure."""
    crashed = [answer["id"] for answer in answers if _crashed(answer)]
    silent = [answer["id"] for answer in answers if _silent(answer)]
    said = [f"{word} in {', '.join(ids)}" for word, ids in (("crashed", crashed), ("silent", silent)) if ids]
    return "; ".join(said) + "." if said else ""
