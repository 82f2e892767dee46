"""What is no recording, or no longer the one that was written: an error in one line, or an answer that says so.

Wherever something is read of a broken recording, it is what was written, and what is missing is said: damage never
turns into "nothing found".
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from gradtrace_cli.main import main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradtrace.analysis.run import open_run
from gradtrace.errors import NotARunError, RunNotFoundError
from gradtrace.trace.arrow import ARROW_SCHEMA, batch_of_records
from gradtrace.trace.journal import Journal
from gradtrace.trace.merging import encode, merge
from gradtrace.trace.process import this_process
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo
from gradtrace.trace.schema import Record
from gradtrace.trace.seal import BLOCK, find_damage, seal
from gradtrace.trace.writer import RunWriter
from tests.broken import (
    BAD_STEP,
    STEPS,
    Mutation,
    answers,
    finished,
    in_pieces,
    info_of,
    mutated,
    mutations,
    of_two_ranks,
    questions,
    records_of,
    rows_in,
)

QUICK = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
AGAIN = "copy it again from where it was recorded"
CHANGED = "another program has changed it"


def error_of(path: Path | str) -> str:
    """What is said of something that cannot be read, without its name."""
    with pytest.raises(NotARunError) as error:
        open_run(path)
    return str(error.value).removeprefix(f"{path} ")


def rows_at(path: Path | str) -> list[tuple[Any, ...]]:
    with open_run(path) as run:
        return rows_in(run)


def missing_at(path: Path | str) -> list[str]:
    with open_run(path) as run:
        return run.missing


# Bytes --------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = finished(tmp_path / "run.parquet")
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    group = pq.read_metadata(path).row_group(0)
    first, last = group.column(0), group.column(group.num_columns - 1)
    places = [1, 2, 3, 4, 8, 11, first.dictionary_page_offset + 3, first.data_page_offset + 1, last.data_page_offset]
    places += [footer - 20, footer - 5, footer, footer + 1, (footer + len(data)) // 2]
    places += [len(data) - 8, len(data) - 6, len(data) - 4, len(data) - 1]
    for length in places:
        path.write_bytes(data[:length])
        wanted = "is not a Parquet file; name what `gradtrace record` wrote"
        if length >= 4:
            wanted = f"is cut off: it begins as a Parquet file and has no end; {AGAIN}"
        assert error_of(path) == wanted, length


@QUICK
@given(how=mutations())
def test_no_byte_of_a_finished_file_changes_unseen(tmp_path: Path, file: Path, how: Mutation) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(mutated(file.read_bytes(), how))
    if broken.read_bytes() != file.read_bytes():
        assert error_of(broken).endswith((AGAIN, "name what `gradtrace record` wrote", "has reached it"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied and broken."""
    return finished(tmp_path_factory.mktemp("file") / "run.parquet")


def test_the_seal_names_the_block_that_has_changed_and_other_readers_do_not_see_it(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    table = pa.table({"x": pa.array([os.urandom(2**20) for _ in range(5 * BLOCK // 2**20)])})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    seal(path)
    assert pq.read_table(path) == table
    assert duckdb.sql(f"SELECT count(*) FROM '{path}'").fetchall() == [(table.num_rows,)]
    fd = os.open(path, os.O_RDWR)
    assert find_damage(fd) is None
    for place, words in (
        (0, f"its bytes 0 to {BLOCK:,} are not what was written"),
        (2 * BLOCK + 5, f"its bytes {2 * BLOCK:,} to {3 * BLOCK:,} are not what was written"),
        (os.fstat(fd).st_size - 20, "its footer is not what was written"),
    ):
        old = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([old[0] ^ 1]), place)
        assert find_damage(fd) == words
        os.pwrite(fd, old, place)
    os.close(fd)


SEALED_AT_EXIT = """
import atexit, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from gradtrace.trace.seal import BLOCK, find_damage, seal

path = Path(sys.argv[1])
pq.write_table(pa.table({"x": [bytes(BLOCK)] * 5}), path, compression="none", use_dictionary=False)

def last_thing():
    seal(path)
    with path.open("rb") as file:
        print(find_damage(file.fileno()), path.stat().st_size > 5 * BLOCK)

atexit.register(last_thing)
"""


def test_a_large_file_is_sealed_by_an_interpreter_that_exits(tmp_path: Path) -> None:
    """That is where a recording is finished, and where no thread can be started."""
    path = tmp_path / "large.parquet"
    done = subprocess.run([sys.executable, "-c", SEALED_AT_EXIT, str(path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None True\n", "")
    with path.open("r+b") as file:
        assert find_damage(file.fileno()) is None
        file.seek(3 * BLOCK + 7)
        file.write(b"X")
        file.flush()
        assert find_damage(file.fileno()) == f"its bytes {3 * BLOCK:,} to {4 * BLOCK:,} are not what was written"


# Pieces -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in its pieces, to be copied and broken."""
    return in_pieces(tmp_path_factory.mktemp("pieces") / "run.parquet")


@pytest.fixture(scope="module")
def whole(pieces: Path) -> list[tuple[Any, ...]]:
    return rows_at(pieces)


@QUICK
@given(st.data())
def test_of_a_broken_piece_what_is_read_was_written_and_what_is_missing_is_said(
    tmp_path: Path, pieces: Path, whole: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in pieces.iterdir())))
    parts = tmp_path / "broken.parquet.parts"
    shutil.rmtree(parts, ignore_errors=True)
    shutil.copytree(pieces, parts)
    (parts / name).write_bytes(mutated((pieces / name).read_bytes(), data.draw(mutations())))
    with open_run(parts) as run:
        rows = rows_in(run)
        assert set(rows) <= set(whole) and rows == sorted(rows, key=lambda row: row[3])
        assert len(rows) == len(whole) or run.damage


def test_every_byte_at_which_a_journal_is_cut_off_costs_what_follows_and_is_said(tmp_path: Path) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    journal = parts / "journal-000001.arrow"
    data = journal.read_bytes()
    for length in range(0, len(data), 997):
        journal.write_bytes(data[:length])
        with open_run(parts) as run:
            steps = [step for (step,) in run.execute("SELECT DISTINCT step FROM records ORDER BY 1").fetchall()]
            assert steps in ([0, 1, 4], [0, 1, 2, 4]), length
            last = steps[-2]
            how = "is damaged" if last == 2 else "is left out, it is damaged"
            lost = f"what was recorded between steps {last} and 4 is missing, or a part of them"
            assert run.damage == [f"journal-000001.arrow {how}: {lost}"]


def test_a_part_of_zeros_is_left_out_and_the_journal_that_still_stands_beside_it_is_read(tmp_path: Path) -> None:
    """As after a power failure: the name has reached the disk, the data has not."""
    parts = in_pieces(tmp_path / "run.parquet")
    journal = Journal(parts / "journal-000003.arrow")
    journal.append(batch_of_records(records_of(STEPS)))
    journal.close()
    (parts / "part-000003.parquet").write_bytes(bytes(4096))
    assert {row[1] for row in rows_at(parts)} == {*range(STEPS + 1)}
    assert missing_at(parts) == []
    (parts / "journal-000003.arrow").unlink()
    (parts / "journal-000003.crc").unlink()
    assert missing_at(parts) == [
        "part-000003.parquet is left out, it is not a Parquet file; name what `gradtrace record` wrote: "
        f"what was recorded after step {STEPS - 1}, or in it, is missing"
    ]


def test_a_gap_in_the_pieces_is_said_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    for name in ("part-x.parquet", "journal-1.arrow", "notes.txt", "journal-backup.arrow", "part-000009.parquet.tmp"):
        (parts / name).write_text("not ours")
    (parts / "directory").mkdir()
    assert missing_at(parts) == []
    (parts / "journal-000001.arrow").unlink()
    assert missing_at(parts) == [
        "piece 1 is gone: what was recorded between steps 1 and 4 is missing, or a part of them"
    ]
    (parts / "part-000000.parquet").unlink()
    assert missing_at(parts) == ["pieces 0 to 1 are gone: what was recorded before step 4 is missing"]


def test_the_last_piece_that_is_gone_is_missed_by_the_number_of_records(tmp_path: Path) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    (parts / "journal-000002.arrow").unlink()
    assert missing_at(parts) == ["7 of 35 records are gone"]


def test_pieces_of_another_run_are_left_out(tmp_path: Path) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    shutil.copy(parts / "part-000000.parquet", parts / "part-000003.parquet")
    other = in_pieces(tmp_path / "other.parquet", rank=1)
    shutil.copy(other / "journal-000002.arrow", parts / "journal-000004.arrow")
    assert missing_at(parts) == [
        "part-000003.parquet (and 1 more like it) is left out, it is of another run: "
        "what was recorded after step 4, or in it, is missing"
    ]
    assert len(rows_at(parts)) == 35


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", bytes(700), b'{"schema_version": 1, "run_id": 3}'])
def test_without_its_facts_a_run_in_pieces_is_read_all_the_same(tmp_path: Path, content: bytes | None) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    (parts / "run.json").unlink()
    if content is not None:
        (parts / "run.json").write_bytes(content)
    with open_run(parts) as run:
        assert (run.end, len(run.damage), run.steps) == ("unknown", 1, STEPS)
        assert run.damage[0].startswith("run.json ")
        assert run.damage[0].endswith(
            ": the command, the configuration, the types of modules and how the run ended are not known"
        )
        verdict = run.first_nan()
        assert (verdict.to_dict()["step"], verdict.to_dict()["module"]) == (BAD_STEP, "head")


def test_a_damaged_piece_is_not_merged_into_a_file_that_seems_whole(tmp_path: Path) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    journal = parts / "journal-000001.arrow"
    data = journal.read_bytes()
    for content in (data[:5000] + b"X" + data[5001:], data[:5000], None):
        journal.write_bytes(content) if content else journal.unlink()
        with pytest.raises(OSError, match="damaged"):
            merge(parts, tmp_path / "run.parquet", info_of(records=35))
        with pytest.raises(OSError):
            encode(parts, 1)
        assert not (tmp_path / "run.parquet").exists()
        assert not (parts / "part-000001.parquet").exists()


def test_beside_a_damaged_file_its_pieces_are_read(tmp_path: Path) -> None:
    """A power failure may come when the file has its name and not yet its content."""
    path = finished(tmp_path / "run.parquet")
    whole, data = rows_at(path), path.read_bytes()
    parts = in_pieces(tmp_path / "run.parquet")
    facts = json.loads((parts / "run.json").read_text()) | {"process": _dead_process()}
    (parts / "run.json").write_text(json.dumps(facts))
    for content, words in (
        (data[:3000], f"is cut off: it begins as a Parquet file and has no end; {AGAIN}"),
        (b"", "is empty: nothing of the recording has reached it"),
        (
            data[:900] + bytes(90) + data[990:],
            f"is damaged: its bytes 0 to {rows_end(data):,} are not what was written",
        ),
    ):
        path.write_bytes(content)
        assert rows_at(path) == whole
        (said,) = missing_at(path)
        assert said.startswith(f"run.parquet is left out, it {words}")
        assert said.endswith("; the pieces beside it are read")
    path.write_bytes(data)
    assert missing_at(path) == []
    assert not parts.exists(), "they are no longer needed"


def _dead_process() -> dict[str, Any]:
    return this_process() | {"started": 1}


def rows_end(data: bytes) -> int:
    """Where the rows of a sealed file end: before its footer are two checksums, their number and the seal's name."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little") - 2 * 4 - 12


# Ranks --------------------------------------------------------------------------------------------------------------


def test_of_a_damaged_rank_the_others_are_read(tmp_path: Path) -> None:
    run = of_two_ranks(tmp_path / "run.parquet")
    rank = run / "rank-1.parquet"
    data = rank.read_bytes()
    rank.write_bytes(data[:1000] + b"X" + data[1001:])
    assert {row[0] for row in rows_at(run)} == {0}
    bad = f"its bytes 0 to {rows_end(data):,} are not what was written"
    assert missing_at(run) == [
        f"rank-1.parquet is left out, it is damaged: {bad}; {AGAIN}",
        "rank 1 of 2 has no file",
    ]
    (run / "rank-0.parquet").write_bytes(b"")
    assert error_of(run) == (
        "has no run that can be read: rank-0.parquet is left out, it is empty: nothing of the recording has reached it"
    )


def test_ranks_that_are_missing_are_named_together_and_one_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run.parquet"
    for rank in (0, 3):
        finished(run, rank, 9)
    assert missing_at(run) == ["ranks 1 to 2 of 9 have no file", "ranks 4 to 8 of 9 have no file"]
    shutil.copy(run / "rank-3.parquet", run / "copy.parquet")
    assert error_of(run) == (
        "has rank 3 more than once: copy.parquet, rank-3.parquet; name the files to read, or one of them"
    )
    assert rows_at(run / "copy.parquet") == rows_at(run / "rank-3.parquet")


def test_other_files_in_the_directory_of_a_run_are_left_out_and_named(tmp_path: Path) -> None:
    run = of_two_ranks(tmp_path / "run.parquet")
    whole = rows_at(run)
    pandas.DataFrame({"x": [1]}).to_parquet(run / "a.parquet")
    (run / "step=3").mkdir()
    pandas.DataFrame({"x": [1]}).to_parquet(run / "step=3" / "b.parquet")
    os.mkfifo(run / "pipe.parquet")
    assert rows_at(run) == whole
    assert missing_at(run) == ["a.parquet is left out, it is a Parquet file, but not a gradtrace run"]


# Columns ------------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> Path:
    """Write a run as another program would, after a change of its table."""
    table = change(pq.read_table(path))
    other = path.with_name("rewritten.parquet")
    pq.write_table(table, other, **options)
    return other


def _column(name: str, make: Callable[[pa.Table], Any]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.schema.get_field_index(name), name, make(table))


def _null(name: str) -> Callable[[pa.Table], pa.Table]:
    return _column(name, lambda table: pc.if_else(pc.equal(table["seq"], 9), None, table[name]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.drop_columns(["norm"]), f"has no column norm: {CHANGED}"),
        (
            _column("nan_count", lambda table: table["nan_count"].cast(pa.float64())),
            f"has the column nan_count as DOUBLE, not BIGINT: {CHANGED}",
        ),
        (
            _column("time", lambda table: table["time"].cast(pa.timestamp("us"))),
            f"has the column time as TIMESTAMP, not TIMESTAMP WITH TIME ZONE: {CHANGED}",
        ),
        (_null("step"), f"has rows with an impossible value, or none, in the column step: {CHANGED}"),
        (_null("path"), f"has rows with an impossible value, or none, in the column path: {CHANGED}"),
        (
            _column("nan_count", lambda table: pc.negate(table["nan_count"])),
            f"has rows with an impossible value, or none, in the column nan_count: {CHANGED}",
        ),
        (
            _column("seq", lambda table: pc.add(table["seq"], 2**60)),
            f"has rows with an impossible value, or none, in the column seq: {CHANGED}",
        ),
        (
            _column("rank", lambda table: pc.add(table["rank"], pa.scalar(3, pa.int32()))),
            "is of rank 0 and has records of another: another program changed it",
        ),
        (lambda table: table.slice(3), "has 32 of its 35 records: another program changed it"),
        (
            lambda table: table.replace_schema_metadata(None),
            "is a Parquet file, but not a gradtrace run",
        ),
    ],
)
def test_columns_that_are_not_those_of_a_recording(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    assert error_of(rewritten(finished(tmp_path / "run.parquet"), change)) == words


@pytest.mark.parametrize("compression", ["gzip", "lz4", "snappy", "none"])
def test_a_run_that_another_program_wrote_otherwise_reads_the_same(tmp_path: Path, compression: str) -> None:
    path = finished(tmp_path / "run.parquet")

    def otherwise(table: pa.Table) -> pa.Table:
        more = table.append_column("extra", pa.array([[{"a": 1}]] * table.num_rows))
        return more.take(pa.array(range(table.num_rows)[::-1])).select([*more.column_names[::-1]])

    other = rewritten(path, otherwise, compression=compression, row_group_size=4)
    assert rows_at(other) == rows_at(path)
    with open_run(path) as one, open_run(other) as two:
        facts = one.first_nan().to_dict(), two.first_nan().to_dict()
        assert facts[0] | {"run": 0} == facts[1] | {"run": 0}
        assert sorted(two.sql("FROM records").rows) == sorted(one.sql("FROM records").rows)


def test_without_a_seal_damage_that_shows_late_is_an_error_of_the_file(tmp_path: Path) -> None:
    good = finished(tmp_path / "run.parquet")
    path = rewritten(good, lambda table: table, compression="zstd")
    column = pq.read_metadata(path).row_group(0).column(ARROW_SCHEMA.get_field_index("max"))
    with path.open("r+b") as file:
        file.seek(column.data_page_offset + column.total_compressed_size // 2 - 20)
        file.write(bytes(column.total_compressed_size // 2))
    refused = answers(path, {name: questions(str(good))[name] for name in ("first_nan", "summary", "rows")})
    assert refused
    assert all(str(path) in words and "DuckDB says" in words for words in refused.values())


# Metadata -----------------------------------------------------------------------------------------------------------


def with_metadata(path: Path, text: str | bytes) -> Path:
    return rewritten(path, lambda table: table.replace_schema_metadata({METADATA_KEY: text}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_id": 3}, "run_id is 3"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 10**12}, "world_size is 1000000000000"),
        ({"steps": 10**30}, f"steps is {10**30}"),
        ({"steps": True}, "steps is true"),
        ({"modules": {"a": 1}}, 'modules is {"a": 1}'),
        ({"modules": [{"name": "a"}]}, "it has no type"),
        ({"modules": [{"name": "a", "type": "T", "depth": 2**40}]}, f"modules has depth {2**40} and line None"),
        ({"thinned": {"every": 2}}, 'thinned is {"every": 2}'),
        ({"schema_version": "1"}, "schema_version is '1'"),
        ({"command": "rm"}, 'command is "rm"'),
    ],
)
def test_facts_that_are_none(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    facts = json.loads(info_of().to_json()) | change
    path = with_metadata(finished(tmp_path / "run.parquet"), json.dumps(facts))
    assert error_of(path) == f"holds no readable gradtrace metadata: {words}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is no JSON"),
        ("{", "it is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no JSON object"),
        ('{"schema_version": NaN}', "NaN is not JSON"),
        ('{"schema_version": 1e999, "run_id": "a"}', "schema_version is inf"),
        ("{}", "it has no schema_version"),
    ],
)
def test_metadata_that_is_no_object(tmp_path: Path, text: str, words: str) -> None:
    path = with_metadata(finished(tmp_path / "run.parquet"), text)
    assert error_of(path) == f"holds no readable gradtrace metadata: {words}"


def test_facts_that_are_odd_and_possible_do_no_harm(tmp_path: Path) -> None:
    good = finished(tmp_path / "run.parquet")
    facts = json.loads(info_of(records=35).to_json())
    facts["modules"][1]["parameters"] = {"weight": "[x]", "bias": f"[{10**30}]"}
    facts |= {"steps": 2**62, "config": {"first_step": "many"}, "unheard of": {"a": [None]}, "incidents": -4}
    text = json.dumps(facts)[:-1] + ', "end": "completed", "end": "again"}'
    assert answers(with_metadata(good, text), questions(str(good))) == {}


# What is no Parquet file --------------------------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's name has to be short
        opened.bind(path.name)
        os.chdir(here)


def _encrypted(path: Path) -> None:
    path.write_bytes(b"PARE" + bytes(40) + b"PARE")


NOT_PARQUET = "is not a Parquet file; name what `gradtrace record` wrote"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b""), "is empty: nothing of the recording has reached it"),
        (lambda path: path.write_bytes(bytes(5000)), NOT_PARQUET),
        (lambda path: path.write_text("step,loss\n1,2\n"), NOT_PARQUET),
        (lambda path: path.write_bytes(gzip.compress(b"PAR1" * 9)), NOT_PARQUET),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), NOT_PARQUET),
        (_encrypted, "is an encrypted Parquet file; decrypt it first"),
        (lambda path: pandas.DataFrame({"x": [1]}).to_parquet(path), "is a Parquet file, but not a gradtrace run"),
        (lambda path: polars.DataFrame({"x": [[1]]}).write_parquet(path), "is a Parquet file, but not a gradtrace run"),
        (_fifo, "is a pipe; a recording is read from a file"),
        (_socket, "is a socket; a recording is read from a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device; a recording is read from a file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path.mkdir(), "is a directory without a run in it"),
        (lambda path: path.symlink_to("nowhere"), "is no whole run: {path} is missing"),
    ],
)
def test_what_is_no_recording_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any], words: str
) -> None:
    monkeypatch.setattr("gradtrace.analysis.ranks._PAUSE", 0)
    path = tmp_path / "run.parquet"
    make(path)
    assert error_of(path) == words.replace("{path}", str(path))


@pytest.mark.parametrize("name", ["", "/", ".", "..", "a\0b", "x" * 300, "[", "**", "/dev/null/x", "nowhere/*"])
def test_names_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((RunNotFoundError, NotARunError)):
        open_run(name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["journal-000001.arrow", "part-000000.parquet", "run.json"])
def test_a_pipe_among_the_pieces_is_never_waited_for(tmp_path: Path, name: str) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    (parts / name).unlink()
    os.mkfifo(parts / name)
    assert "is a pipe; a recording is read from a file" in missing_at(parts)[0]


# Commands -----------------------------------------------------------------------------------------------------------


COMMANDS = [
    ("first-nan", "BROKEN"),
    ("first-nan", "--json", "BROKEN"),
    ("summary", "BROKEN"),
    ("summary", "-f", "csv", "BROKEN"),
    ("sql", "BROKEN", "FROM records", "-f", "json"),
    ("sql", "BROKEN", "--schema"),
    ("check", "-f", "jsonl", "BROKEN"),
    ("diff", "BROKEN", "GOOD"),
    ("diff", "GOOD", "BROKEN"),
    ("report", "BROKEN", "-o", "page.html"),
    ("export", "BROKEN", "--tensorboard", "events"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_refuses_a_damaged_file_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "GOOD")
    broken = finished(tmp_path / "BROKEN")
    data = broken.read_bytes()
    broken.write_bytes(data[:2000] + b"X" + data[2001:])
    assert main(command) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradtrace: error: BROKEN is damaged: its bytes 0 to ")
    assert err.endswith(f" are not what was written; {AGAIN}\n") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BROKEN", "GOOD"]


def test_nothing_found_in_what_is_left_is_not_taken_for_health(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = in_pieces(tmp_path / "run.parquet")
    for piece in ("journal-000001.arrow", "journal-000002.arrow"):  # the steps with the NaN
        data = (parts / piece).read_bytes()
        (parts / piece).write_bytes(data[:2500] + b"X" + data[2501:])
    assert main(["first-nan", str(parts)]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "No NaN or Inf that matters in 2 steps of 2 modules (14 records).\n"
        "A part of the recording is damaged or gone: what that held is not known.\n"
    )
    assert err == (
        "gradtrace: note: the run ended with signal SIGTERM; the last recorded step is 1\n"
        "gradtrace: note: journal-000001.arrow (and 1 more like it) is left out, it is damaged: "
        "what was recorded after step 1, or in it, is missing\n"
    )
    assert main(["first-nan", "--exit-code", str(parts)]) == 3
    assert main(["first-nan", "--exit-code", str(finished(tmp_path / "whole.parquet"))]) == 1
    for form in ("csv", "json", "jsonl", "markdown"):
        capsys.readouterr()
        assert main(["sql", "-f", form, str(parts), "SELECT DISTINCT step FROM records"]) == 0
        assert "is damaged" in capsys.readouterr().err


def test_all_questions_to_pieces_that_are_half_there_are_answered(tmp_path: Path) -> None:
    good = finished(tmp_path / "good.parquet")
    parts = in_pieces(tmp_path / "run.parquet")
    (parts / "run.json").write_bytes(b"")
    (parts / "journal-000001.arrow").write_bytes(b"\xff" * 300)
    assert answers(parts, questions(str(good))) == {}


def test_more_pieces_than_files_may_be_open_is_said_and_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    writer = RunWriter(path, RunInfo("r"), rows_per_part=1, max_bytes=None)
    for step in range(60):
        writer.write(batch_of_records([Record(step, step, "forward", "output", "x")]))
    writer._background.wait(0)
    writer.close_parts(RunInfo("r", end="exit 1"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    for room in (30, 65):  # not for the pieces; for these, but not for them and what reads them
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + room, hard))
        try:
            with pytest.raises(NotARunError, match="cannot be read: it has more files than may be open at a time; all"):
                open_run(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # The command line takes what it may have.
    words = ["-Sn", "50", sys.executable, "-m", "gradtrace", "sql", str(path), "select count(*) from records"]
    done = subprocess.run(["sh", "-c", 'ulimit "$1" "$2"; shift 2; "$@"', "sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1], done.stderr) == (0, "60", "")
