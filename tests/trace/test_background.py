"""The thread that does the writer's jobs: in order, whoever submits them, and never in anybody's way."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gradtrace.trace.background import Background


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_jobs_are_done_in_their_order_in_another_thread() -> None:
    done: list[tuple[int, bool]] = []
    background = Background("in-order")
    for number in range(20):
        background.submit(lambda n=number: done.append((n, threading.current_thread() is threading.main_thread())))
    background.wait(0)
    assert done == [(number, False) for number in range(20)]
    background.close()
    assert not threads("in-order")


def test_waiting_is_only_for_more_jobs_than_are_allowed() -> None:
    gate = threading.Event()
    background = Background("gate")
    for _ in range(3):
        background.submit(lambda: gate.wait(30) or None)
    start = time.perf_counter()
    background.wait(3)
    assert time.perf_counter() - start < 10
    threading.Timer(0.2, gate.set).start()
    background.wait(2)
    assert gate.is_set()
    background.close()


def test_what_a_job_raises_is_raised_where_one_waits_once() -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    done: list[int] = []
    background = Background("fails")
    background.submit(fails)
    background.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="No space"):
        background.wait(0)
    background.wait(0)
    assert done == [1]
    background.close()


def test_a_job_that_is_interrupted_from_outside_is_answered_too() -> None:
    def interrupted() -> None:
        raise SystemExit

    background = Background("interrupted")
    background.submit(interrupted)
    background.close()
    assert background._results.qsize() == 1  # else the next line would wait for ever
    with pytest.raises(RuntimeError, match="interrupted by SystemExit"):
        background.wait(0)


def test_what_is_abandoned_is_not_begun() -> None:
    gate, begun = threading.Event(), threading.Event()
    done: list[int] = []
    background = Background("abandoned")
    background.submit(begun.set)
    background.submit(lambda: gate.wait(30) or None)
    background.submit(lambda: done.append(1))
    assert begun.wait(30)
    background.abandon()
    gate.set()
    background.close()
    assert done == []
    assert not threads("abandoned")


def test_an_idle_thread_ends_with_what_it_works_for() -> None:
    background = Background("idle")
    background.submit(lambda: None)
    background.wait(0)
    [thread] = threads("idle")
    del background
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_where_there_can_be_no_thread_a_job_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[threading.Thread] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        background = Background("none")
        background.submit(lambda: done.append(threading.current_thread()))
    background.wait(0)
    assert done == [threading.current_thread()]
    background.submit(lambda: done.append(threading.current_thread()))
    background.close()
    assert len(done) == 2


AFTER_MAIN = """
    import os, sys, threading, time
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.schema import Record
    from gradtrace.trace.writer import RunWriter

    writer = RunWriter(sys.argv[1], RunInfo("r"), rows_per_part=10)

    def write(steps):
        for step in steps:
            writer.write(batch_of_records([Record(step, step, "forward", "output", "")]))

    def train():
        threading.main_thread().join()
        write(range(5, 100))
        writer._background.wait(0)
        print(*sorted(os.listdir(sys.argv[1] + ".parts")))

    write(range(5))
    threading.Thread(target=train).start()
"""


def test_a_training_that_outlives_the_main_thread_is_still_turned_into_parts(tmp_path: Path) -> None:
    # concurrent.futures would take no job any more: ten times as many bytes, and no limit to them.
    words = [sys.executable, "-c", textwrap.dedent(AFTER_MAIN), str(tmp_path / "run.parquet")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    pieces = [name for name in done.stdout.split() if name.endswith((".arrow", ".parquet"))]
    assert pieces == [f"part-{number:06d}.parquet" for number in range(10)]


INTERRUPTED = """
    import os, pathlib, signal, sys
    from gradtrace.trace import background, lock, parts, place, runinfo, shelf, writer as writer_module
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.schema import Record
    from gradtrace.trace.writer import RunWriter

    # A child for each moment: after so many lines of Python that a write runs through, a signal comes.
    OWN = os.path.dirname(writer_module.__file__), "/queue.py", "/threading.py", "/pathlib.py", "/json/"
    STEPS = 6

    def child(path, moment):
        signal.alarm(20)
        writer = RunWriter(path, RunInfo("r"), rows_per_part=6)
        told = os.open(path + ".told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        def handler(number, frame):
            try:
                writer.close_parts(RunInfo("r", end="signal SIGTERM"))
            finally:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        signal.signal(signal.SIGTERM, handler)
        count = 0
        def trace(frame, event, argument):
            nonlocal count
            if not any(own in frame.f_code.co_filename for own in OWN):
                return None
            if event == "line":
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGTERM)
            return trace
        sys.settrace(trace)
        for step in range(STEPS):
            rows = [Record(step, 2 * step + n, "forward", "output", "x", max=step) for n in range(2)]
            writer.write(batch_of_records(rows))
            os.write(told, f"{step}\\n".encode())
            if step % 2:
                writer.update(RunInfo("r", notes=[str(step)]))
        sys.settrace(None)
        os._exit(0)

    batch_of_records([])  # so that what this imports is not imported by every child
    first, stride, most = map(int, sys.argv[2:])
    for moment in range(first, most, stride):
        path = os.path.join(sys.argv[1], str(moment))
        pid = os.fork()
        if pid == 0:
            child(path, moment)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(moment, status, flush=True)
        if status == 0:
            break
"""


def interrupt(folder: Path, first: int, stride: int, most: int = 100_000) -> dict[int, int]:
    """Run a writer once for each moment, get it a SIGTERM there, and return how it ended, by moment."""
    words = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(folder), str(first), str(stride), str(most)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=True)
    return {int(moment): int(status) for moment, status in (line.split() for line in done.stdout.splitlines())}


def assert_kept(path: Path) -> None:
    """See that every step that was told to be written is there, whole, and at most one more."""
    from gradtrace.analysis.run import open_run

    told = path.with_name(f"{path.name}.told")
    steps = [int(step) for step in told.read_text().split()] if told.exists() else []
    with open_run(path) as run:
        rows = run.execute("SELECT step, seq, max FROM records ORDER BY seq").fetchall()
        assert run.end == "signal SIGTERM", path
    assert rows == [(n // 2, n, n // 2) for n in range(len(rows))], path
    assert len(rows) in (2 * len(steps), 2 * len(steps) + 2), path


def test_a_signal_at_any_line_of_a_write_kills_and_loses_no_step(tmp_path: Path) -> None:
    ended = interrupt(tmp_path, first=50, stride=197)
    assert len(ended) > 15
    *killed, last = ended
    assert {ended[moment] for moment in killed} == {-signal.SIGTERM}  # and none hangs: that would be SIGALRM
    assert ended[last] == 0
    for moment in killed:
        assert_kept(tmp_path / str(moment))


AT_EXIT = """
    import atexit, sys
    from gradtrace.trace import seal
    from gradtrace.trace.arrow import batch_of_records
    from gradtrace.trace.runinfo import RunInfo
    from gradtrace.trace.schema import Record
    from gradtrace.trace.writer import RunWriter

    seal.BLOCK = 512  # of a large recording there are many
    writer = RunWriter(sys.argv[1], RunInfo("r"), rows_per_part=100)
    atexit.register(writer.finish, RunInfo("r", end="completed"))
    for step in range(1000):
        writer.write(batch_of_records([Record(step, step, "forward", "output", "", norm=step / 7)]))
"""


def test_a_large_run_is_finished_in_an_exit_handler(tmp_path: Path) -> None:
    # That is where ``record`` finishes: the interpreter's own pools have shut down by then.
    path = tmp_path / "run.parquet"
    words = [sys.executable, "-c", textwrap.dedent(AT_EXIT), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.parquet"]
    assert path.stat().st_size > 4 * 512
    assert pq.read_metadata(path).num_rows == 1000
