"""Measures RunWriter: rows per second through write and finish, bytes a row.

python -m benchmarks.writer --rows 1000000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.make_trace import batches
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.writer import RunWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    made = list(batches(rows))
    rows = sum(batch.num_rows for batch in made)
    with tempfile.TemporaryDirectory() as directory:
        info = RunInfo("benchmark", end="completed")
        start = time.perf_counter()
        writer = RunWriter(Path(directory) / "run.parquet", info)
        for batch in made:
            writer.write(batch)
        written = time.perf_counter()
        writer.finish(info)
        finished = time.perf_counter()
    print(f"write            {rows / (written - start):,.0f} rows a second")
    print(f"write and finish {rows / (finished - start):,.0f} rows a second")
    print(f"                 {writer.bytes_written / rows:.1f} bytes a row")


if __name__ == "__main__":
    main()
