"""Writes a large, plausible trace: a transformer that trains well and goes NaN in its last backward pass.

    python -m benchmarks.make_trace out.parquet --rows 10000000

No model is run: one step's rows are made once and varied from step to step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import COLUMN_NAMES, Record
from gradtrace.trace.writer import RunWriter

BLOCKS = 48
WIDTH = 256
SHAPE = f"[8, 128, {WIDTH}]"
FAILING = f"blocks.{BLOCKS // 2}.attention"
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
CHILDREN = {
    "norm_1": ("LayerNorm", {"weight": f"[{WIDTH}]", "bias": f"[{WIDTH}]"}),
    "attention": ("Attention", {}),
    "attention.qkv": ("Linear", {"weight": f"[{3 * WIDTH}, {WIDTH}]", "bias": f"[{3 * WIDTH}]"}),
    "attention.out": ("Linear", {"weight": f"[{WIDTH}, {WIDTH}]", "bias": f"[{WIDTH}]"}),
    "norm_2": ("LayerNorm", {"weight": f"[{WIDTH}]", "bias": f"[{WIDTH}]"}),
    "up": ("Linear", {"weight": f"[{4 * WIDTH}, {WIDTH}]", "bias": f"[{4 * WIDTH}]"}),
    "act": ("GELU", {}),
    "down": ("Linear", {"weight": f"[{WIDTH}, {4 * WIDTH}]", "bias": f"[{WIDTH}]"}),
}


def modules() -> list[ModuleInfo]:
    """Return the model's module table."""
    table = [
        ModuleInfo("", "GPT", root=True),
        ModuleInfo("embedding", "Embedding", depth=1, parameters={"weight": f"[65, {WIDTH}]"}),
    ]
    for block in range(BLOCKS):
        table.append(ModuleInfo(f"blocks.{block}", "Block", depth=2))
        for name, (kind, parameters) in CHILDREN.items():
            depth = 3 + name.count(".")
            table.append(ModuleInfo(f"blocks.{block}.{name}", kind, depth=depth, parameters=parameters))
    return table


def one_step(nan_from: str | None = None) -> list[Record]:
    """Return one step's rows, its gradients NaN from the module ``nan_from`` backwards."""
    table, seq = modules(), count()
    rows = []
    for module in table:
        for tensor in ("input", "output"):
            rows.append(_record(seq, "forward", tensor, module.name))
    rows.append(_record(seq, "loss", "loss", None, shape="[]"))
    bad = False
    for module in reversed(table):
        rows.append(_record(seq, "backward", "grad_output", module.name, bad=bad))
        bad = bad or module.name == nan_from
        for path, shape in module.parameters.items():
            rows.append(_record(seq, "backward", "grad", module.name, path, shape, bad))
        rows.append(_record(seq, "backward", "grad_input", module.name, bad=bad))
    for module in table:
        for path, shape in module.parameters.items():
            rows.append(_record(seq, "optimizer", "param", module.name, path, shape))
    return rows


def _record(
    seq: Iterator[int],
    phase: str,
    tensor: str,
    module: str | None,
    path: str = "0",
    shape: str = SHAPE,
    bad: bool = False,
) -> Record:
    numel = 1
    for size in filter(None, shape.strip("[]").split(", ")):
        numel *= int(size)
    return Record(
        step=0, seq=next(seq), phase=phase, tensor=tensor, module=module, path=path, call=0, dtype="float32",
        shape=shape, device="cpu", numel=numel, nan_count=numel if bad else 0, posinf_count=0, neginf_count=0,
        min=None if bad else -1.0, max=None if bad else 1.0, norm=None if bad else 10.0,
    )  # fmt: skip


def batches(rows: int) -> Iterator[pa.RecordBatch]:
    """Yield whole steps until there are ``rows`` rows; the last step fails."""
    healthy, failing = batch_of_records(one_step()), batch_of_records(one_step(FAILING))
    steps = -(-rows // healthy.num_rows)
    for step in range(steps):
        yield varied(failing if step == steps - 1 else healthy, step)


def varied(batch: pa.RecordBatch, step: int) -> pa.RecordBatch:
    """Return the rows as another step would have them."""
    size = batch.num_rows
    changed = {
        "step": pa.repeat(pa.scalar(step, pa.int64()), size),
        "seq": pc.add(batch["seq"], step * size),
        "time": pa.repeat(pa.scalar(START + timedelta(seconds=step / 7), batch["time"].type), size),
    }
    for name in ("min", "max", "norm"):
        values = pc.multiply(batch[name], pc.add(pc.random(size), 1 / (1 + step)))
        changed[name] = values.cast(pa.float32()).cast(pa.float64())  # what statistics of float32 look like
    return pa.RecordBatch.from_arrays([changed.get(name, batch[name]) for name in COLUMN_NAMES], schema=batch.schema)


def make_trace(path: Path, rows: int) -> int:
    """Write the trace and return its number of rows."""
    table = modules()
    info = RunInfo("made", command=["train.py"], started=START.isoformat(), modules=table)
    writer = RunWriter(path, info, existing="overwrite", max_bytes=None)
    written = steps = 0
    for batch in batches(rows):
        writer.write(batch)
        written += batch.num_rows
        steps += 1
    info.end, info.steps, info.last_step, info.incidents = "completed", steps, steps - 1, 1
    for module in table:
        module.calls = steps
    writer.finish(info)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    options = parser.parse_args()
    start = time.perf_counter()
    written = make_trace(options.path, options.rows)
    seconds = time.perf_counter() - start
    size = options.path.stat().st_size
    print(f"{written:,} rows, {size / written:.1f} bytes a row, {written / seconds:,.0f} rows a second")


if __name__ == "__main__":
    main()
