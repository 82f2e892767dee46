"""Runs whose facts, those of half a million modules say, are beyond what Arrow takes for a footer by itself."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gradtrace.analysis.run import open_run
from gradtrace.capture.watch.baseline import Baseline
from gradtrace.trace import repair
from gradtrace.trace import writer as writer_module
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.parts import parts_of
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.writer import RunWriter

LARGE = 80_000_000
"""Bytes of facts; Arrow keeps them a second time, a third longer, and refuses a text of more than 100 MB."""


def test_a_run_with_facts_of_a_hundred_megabytes_is_repaired_asked_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.parquet"
    info = RunInfo("large", command=["x" * LARGE], modules=[ModuleInfo("layer", "Linear")])
    writer = RunWriter(path, info)
    writer.write(batch_of_records([Record(0, 0, "forward", "output", "layer", max=2.5)]))
    info.end, info.steps, info.last_step = "completed", 1, 0
    monkeypatch.setattr(writer_module, "remove_parts", lambda parts: None)  # as if it were killed there
    monkeypatch.setattr(repair, "is_alive", lambda process: False)
    writer.finish(info)
    with pytest.raises(OSError, match="limit"):
        pq.ParquetFile(path)

    with open_run(path) as run:
        assert run.execute("SELECT module, max FROM records").fetchall() == [("layer", 2.5)]
        assert run.missing == []
    assert not parts_of(path).exists()
    assert Baseline.of(path).difference([ModuleInfo("layer", "Conv2d")]) == "layer is Conv2d, was Linear"
