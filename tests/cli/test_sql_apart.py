"""A query runs in a process of its own: Ctrl-C, limits and crashes end it from outside, in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from traces import write_run

from gradtrace.trace.schema import Record

LOCKED = "SELECT length(repeat('a', 4000000000))"
"""DuckDB computes this constant with the interpreter locked, where no handler and no thread gets a word in."""

COMMAND = """
import sys
from gradtrace_cli import apart, main
apart._GRACE, apart._GROWTH = {grace}, 200 * 2**20
sys.exit(main.main())
"""


@pytest.fixture
def run(tmp_path):
    return str(write_run(tmp_path / "run.parquet", [Record(0, 0, "forward", "output", "m", max=1.0)]))


def ask(*arguments: str, grace: float = 60.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND.format(grace=grace), "sql", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def apart(code: str) -> subprocess.CompletedProcess[str]:
    """Run a command that is ``code`` apart, without DuckDB."""
    program = f"import os, signal, sys\nfrom gradtrace_cli.apart import run_apart\ndef command():\n    {code}\n"
    command = [sys.executable, "-c", f"{program}sys.exit(run_apart(command))"]
    return subprocess.run(command, capture_output=True, text=True)


def below(process: subprocess.Popen[str], least: int = 0) -> int:
    """Return the process below another one, once it has so many bytes."""
    while True:
        assert process.poll() is None, process.communicate()
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            size = int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            if size >= least:
                return int(child)
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_command_ends_a_query_that_listens_to_nothing(run, end):
    process = ask(run, LOCKED)
    child = below(process, least=300 * 2**20)
    process.send_signal(end)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (130 if end == signal.SIGINT else -end, "", "")
    assert is_gone(child)


def test_time_ends_where_duckdb_does_not_listen(run):
    process = ask(run, LOCKED, "--timeout", "0.5", grace=0.2)
    output, errors = process.communicate(timeout=60)
    said = "the query took longer than it was allowed; a larger --timeout allows it"
    assert (process.returncode, output, errors) == (3, "", f"gradtrace: error: {said}\n")


def test_time_ends_while_rows_are_written(run):
    process = ask(run, "SELECT range FROM range(1000000000000)", "-f", "csv", "--timeout", "0.5")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output[:12]) == (3, "range\n0\n1\n2\n")
    assert errors == "gradtrace: error: the answer took longer than 0.5 s; a larger timeout allows it\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["SELECT repeat('x', 100000000) FROM range(100)", "-f", "csv"],
        ["SELECT range, 'text ' || range FROM range(100000000)", "--rows", "-1"],
    ],
)
def test_memory_that_duckdb_does_not_count_ends_too(run, arguments):
    process = ask(run, *arguments, "--memory", "50MiB")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert re.fullmatch("gradtrace: error: [^\n]* memory[^\n]*\n", errors)


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("return 0", 0, ""),
        ("return 2", 2, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, ""),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            3,
            "gradtrace: error: DuckDB crashed on this query (SIGSEGV): "
            "ask in another way, or with more memory (--memory)\n",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            3,
            "gradtrace: error: the query was killed, most likely for want of memory: ask for less, or see --memory\n",
        ),
    ],
)
def test_the_end_of_the_process_below_is_told(code, exit_code, said):
    done = apart(code)
    assert (done.returncode, done.stderr) == (exit_code, said)


def test_what_it_prints_comes_out_once_and_whole():
    done = apart("print('answer'); print('note', file=sys.stderr); return 0")
    assert (done.stdout, done.stderr) == ("answer\n", "note\n")


def test_a_limit_that_the_user_has_set_is_not_raised():
    code = "apart.limit_growth(2**40); print(resource.getrlimit(resource.RLIMIT_DATA)[0]); return 0"
    setup = "import resource; from gradtrace_cli import apart"
    limit = "resource.setrlimit(resource.RLIMIT_DATA, (2**33, resource.getrlimit(resource.RLIMIT_DATA)[1]))"
    done = apart(f"{setup}; {limit}; {code}")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{2**33}\n", "")


def test_a_system_without_signals_of_pipes_answers_all_the_same():
    refuse = "__import__('fcntl').fcntl = lambda *_: (_ for _ in ()).throw(OSError(25, 'Inappropriate ioctl'))"
    program = f"{refuse}\nimport sys\nfrom gradtrace_cli.apart import run_apart\nsys.exit(run_apart(lambda: 7))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_mistake_of_our_own_is_shown():
    done = apart("raise ZeroDivisionError('ours')")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: ours\n")
