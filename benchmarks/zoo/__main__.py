"""Records every case of the zoo and scores the verdicts.

    python -m benchmarks.zoo
    python -m benchmarks.zoo --only 01 --only 48 --json scores.json
    python -m benchmarks.zoo --watch 0
    python -m benchmarks.zoo --peers

Each script runs unmodified under ``gradtrace record`` in a folder of its own, with ``--watch N`` in watch mode, in
which the first N steps are captured in full: with 0 every answer is the replay's. ``--peers`` asks other tools about
the same scripts instead; they need an environment of their own, which ``make peers`` makes. Exits with 1 where a
verdict is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.zoo import table
from benchmarks.zoo.cases import Case, load
from benchmarks.zoo.peers import compare
from benchmarks.zoo.record import verdict
from benchmarks.zoo.score import FIELDS, score


def judge(case: Case, options: Sequence[str] = ()) -> dict[str, Any]:
    """Record one case, with more options of ``record``, and return its marks with the answer that they are for."""
    answer, trouble = verdict(case, options)
    went = None if answer is None else (answer["confirmation"] or {}).get("status")
    kept = ("found", "step", "micro_step", "phase", "module", "tensor", "path", "kind", "op", "op_kind", "location")
    return {
        "id": case.id,
        "group": case.group,
        "marks": score(case, answer),
        "said": trouble if answer is None else _said(answer),
        "replay": went,
        "answer": answer and {key: answer[key] for key in kept},
    }


def _said(answer: dict[str, Any]) -> str:
    """Return the verdict in one line."""
    if not answer["found"]:
        return "nothing wrong"
    module = "outside" if answer["module"] is None else answer["module"] or "(root)"
    line = (answer["location"] or {}).get("line")
    where = f"step {answer['step']}, {answer['phase']}, {module}, {answer['tensor']} {answer['path']}"
    return f"{where}, {answer['op'] or 'no op'}" + (f", line {line}" if line else "")


def main() -> int:
    """Run the cases that the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="cases whose id starts with ID")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="scripts at a time (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--watch", type=int, metavar="N", help="in watch mode, the first N steps in full")
    parser.add_argument("--peers", action="store_true", help="ask other tools instead")
    options = parser.parse_args()
    cases = load(options.only)
    if options.peers:
        return compare.main(cases, options.json)
    mode = [] if options.watch is None else ["--watch", "--watch-first", str(options.watch)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda case: judge(case, mode), cases))
    print(table.by_case(results, FIELDS), table.totals(results, FIELDS), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(table.all_right(result["marks"]) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
