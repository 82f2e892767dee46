"""A footer larger than Arrow reads by default, as the facts of half a million modules make it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradtrace.analysis.run import open_run
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import Record

ARROW_READS = 100_000_000
"""Bytes."""


def test_a_query_is_answered_where_the_footer_is_larger_than_arrow_likes(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    info = json.loads(RunInfo("large", end="completed", steps=1, records=1).to_json())
    facts = json.dumps(info | {"of a later version": "x" * ARROW_READS}).encode()
    table = pa.Table.from_batches([batch_of_records([Record(7, 0, "forward", "output")])])
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: facts}), path, store_schema=False)
    with pytest.raises(OSError, match="size limit"):
        pq.ParquetFile(path)
    with open_run(path) as run:
        assert run.sql("SELECT step FROM records").rows == [(7,)]
