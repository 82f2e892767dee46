"""The same script under ``gradtrace record`` and under ``python``: streams and exit codes are equal."""

import os
import py_compile
import signal
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts"), "gradtrace"))
UNDER_GRADTRACE = {
    "console script": [sys.executable, CONSOLE_SCRIPT, "record"],  # the same name of Python in its messages
    "python -m": [sys.executable, "-m", "gradtrace", "record"],
}
DRIVER = Path(__file__).parents[1] / "scripts" / "run_script.py"

SCRIPTS = {
    "arguments": "import sys; print(sys.argv, sys.path[0], sys.orig_argv[-1])",
    "module_globals": """
        print(sorted(globals()))
        print(__name__, __file__, __spec__, __package__, __cached__, type(__loader__), __builtins__)
        print(__annotations__)
        x: int = 3
        print(__annotations__)
    """,
    "docstring": '"""What it does."""\nprint(__doc__)',
    "partial_line": "import sys; sys.stdout.write('no newline at the end')",
    "standard_input": "import sys; print(sys.stdin.read().upper(), input.__name__)",
    "future_annotations": "def f(x: Undefined): pass",
    "nested_error": """
        def f(x):
            return g(x)
        def g(x):
            raise ValueError(x)
        f(3)
    """,
    "linked_errors": """
        def f():
            try:
                {}["key"]
            except KeyError:
                raise ValueError("while handling")
        try:
            f()
        except ValueError as error:
            raise RuntimeError("because of") from error
    """,
    "suppressed_context": """
        try:
            {}["key"]
        except KeyError:
            raise ValueError from None
    """,
    "error_group": """
        try:
            group = ExceptionGroup
        except NameError:
            raise ValueError("no groups in this Python")
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise group("several", [error, ValueError(3)])
    """,
    "error_with_note": """
        error = ValueError("x")
        error.__notes__ = ["a note"]
        raise error
    """,
    "assertion": "assert not 'true'",
    "exit_integer": "import sys; sys.exit(3)",
    "exit_text": "import sys; sys.exit('bye')",
    "exit_none": "import sys; sys.exit()",
    "exit_zero": "raise SystemExit(0)",
    "exit_true": "raise SystemExit(True)",
    "exit_large": "raise SystemExit(256 + 7)",
    "exit_tuple": "raise SystemExit((1, 2))",
    "exit_subclass": "class Exit(SystemExit): pass\nraise Exit(4)",
    "exit_at_once": "import os; print('lost'); os._exit(7)",
    "end_of_file": "input()",
    "raised_interrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminates_itself": "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "syntax_error": "x = = 1",
    "indentation_error": "if True:\nx = 1",
    "syntax_error_in_import": "import broken_module",
    "missing_import": "import no_such_module_anywhere",
    "warning_in_main": "import warnings; warnings.warn('old', DeprecationWarning)",
    "click_error": "import click; raise click.ClickException('not ours')",
    "click_program": """
        import click
        @click.command()
        @click.argument("number", type=int)
        def program(number):
            print(number)
        program()
    """,
    "argparse_program": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--rate", type=float)
        print(parser.parse_args())
    """,
    "own_excepthook": """
        import sys
        def show(kind, value, traceback):
            print("own:", kind.__name__, value, traceback.tb_lineno, traceback.tb_next, file=sys.stderr)
        sys.excepthook = show
        raise ValueError("x")
    """,
    "excepthook_exits": """
        import sys
        def show(*args):
            sys.exit(9)
        sys.excepthook = show
        raise ValueError("x")
    """,
    "exit_handlers": """
        import atexit
        atexit.register(print, "registered first, called last")
        atexit.register(print, "registered last, called first")
        print("end of script")
    """,
    "globals_at_exit": """
        import atexit
        atexit.register(lambda: print(sorted(globals())))
    """,
    "globals_at_exit_after_exit": """
        import atexit, sys
        atexit.register(lambda: print(sorted(globals())))
        sys.exit(1)
    """,
    "failing_exit_handler": """
        import atexit
        class Handler:
            def __repr__(self):
                return "<handler>"
            def __call__(self):
                raise ValueError("in the handler")
        atexit.register(Handler())
    """,
    "thread_outlives_script": """
        import atexit, threading
        atexit.register(print, "exit handler")
        main_ended = threading.main_thread()
        def work():
            main_ended.join()
            print("thread")
        threading.Thread(target=work).start()
        print("end of script")
    """,
    "thread_outlives_error": """
        import sys, threading
        def work():
            threading.main_thread().join()
            print("thread", file=sys.stderr)
        threading.Thread(target=work).start()
        raise ValueError("main")
    """,
    "error_in_thread": """
        import threading
        def work():
            raise ValueError("in the thread")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print("main goes on")
    """,
    "exit_in_thread": """
        import sys, threading
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start()
        thread.join()
        print("main goes on")
    """,
    "idle_executor": """
        from concurrent.futures import ThreadPoolExecutor
        executor = ThreadPoolExecutor(2)
        print(executor.submit(pow, 2, 10).result())
    """,
    "asyncio_error": """
        import asyncio
        async def main():
            await asyncio.sleep(0)
            raise ValueError("in a task")
        asyncio.run(main())
    """,
    "pickled_class": """
        import pickle
        class Point:
            def __init__(self, x):
                self.x = x
        print(pickle.loads(pickle.dumps(Point(3))).x, pickle.dumps(Point))
    """,
    "type_hints": """
        from __future__ import annotations
        import dataclasses, typing
        @dataclasses.dataclass
        class Tree:
            left: Tree | None = None
            kind: typing.ClassVar[str] = "oak"
        print(typing.get_type_hints(Tree), [field.name for field in dataclasses.fields(Tree)])
    """,
    "own_source": """
        import inspect, linecache
        class Shown:
            value = 1
        def shown():
            return 2
        print(inspect.getsource(Shown), inspect.getsource(shown), linecache.getline(__file__, 2))
    """,
    "doctested": '''
        import doctest
        def double(x):
            """
            >>> double(2)
            5
            """
            return 2 * x
        print(doctest.testmod())
    ''',
    "child_process": """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv); sys.exit(5)"]).returncode)
    """,
    "forked_child_ends": """
        import os
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "forked_child_fails": """
        import os, sys
        child = os.fork()
        if not child:
            raise ValueError("child")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "forked_child_terminated": """
        import os, signal, time
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, str(signal.getsignal(signal.SIGTERM)).encode())
            time.sleep(60)
        print(os.read(read, 100))
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "spawned_pool": """
        import multiprocessing
        class Point:
            def __init__(self, x):
                self.x = x
        def work(x):
            return Point(x * x)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print([type(point) is Point and point.x for point in pool.map(work, range(3))])
    """,
    "forked_pool": """
        import multiprocessing
        class Point:
            def __init__(self, x):
                self.x = x
        def work(x):
            return Point(x * x)
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print([type(point) is Point and point.x for point in pool.map(work, range(3))])
    """,
    "failing_pool": """
        import multiprocessing
        def work(x):
            return 1 / x
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.map(work, [0])
    """,
}
ARGUMENTS = {
    "arguments": ["a", "--help", "-o", "x", "--", "-q", ""],
    "click_program": ["not a number"],
    "argparse_program": ["--help"],
}
WHERE_THE_START_COUNTS = [
    "arguments",
    "module_globals",
    "linked_errors",
    "exit_integer",
    "end_of_file",
    "raised_interrupt",
    "syntax_error",
    "own_excepthook",
    "thread_outlives_error",
    "spawned_pool",
    "failing_pool",
]


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


def run(command, directory, **options):
    """Run a command; its outcome without the lines that are gradtrace's own."""
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=60, **{"input": "typed\n"} | options
    )
    return Outcome(done.returncode, done.stdout, without_own_lines(done.stderr))


def without_own_lines(text):
    return "".join(line for line in text.splitlines(True) if not line.startswith("gradtrace: "))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A working directory with every script, a package, a directory and a zip file to run."""
    path = tmp_path_factory.mktemp("scripts").resolve()
    for name, source in SCRIPTS.items():
        (path / f"{name}.py").write_text(dedented(source))
    (path / "broken_module.py").write_text("x = = 1\n")
    (path / "cp1252.py").write_bytes("# -*- coding: cp1252 -*-\nprint(ascii('é'))\n".encode("cp1252"))
    (path / "bom.py").write_bytes("print(ascii('é'))\n".encode("utf-8-sig"))
    where = "import sys; print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])\n"
    (path / "package").mkdir()
    (path / "package" / "__init__.py").write_text("print('package imported')\n")
    (path / "package" / "__main__.py").write_text(where)
    (path / "package" / "train.py").write_text(f"from . import helper\n{where}print(helper.NAME)\n")
    (path / "package" / "helper.py").write_text("NAME = __name__\n")
    (path / "package" / "failing.py").write_text("def f():\n    raise ValueError('x')\nf()\n")
    (path / "package" / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    (path / "bare_package").mkdir()
    (path / "bare_package" / "__init__.py").write_text("")
    (path / "failing_package").mkdir()
    (path / "failing_package" / "__init__.py").write_text("1 / 0\n")
    (path / "app").mkdir()
    (path / "app" / "__main__.py").write_text(f"import beside\n{where}")
    (path / "app" / "beside.py").write_text("")
    with zipfile.ZipFile(path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", f"{where}1 / 0\n")
    (path / "links").mkdir()
    (path / "links" / "link.py").symlink_to(path / "arguments.py")
    py_compile.compile(str(path / "arguments.py"), cfile=str(path / "compiled.pyc"))
    return path


def dedented(source):
    lines = source.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(f"{line[indent:]}\n" for line in lines)


@cache
def natively(directory, *arguments, flags=()):
    return run([sys.executable, *flags, *arguments], directory)


@pytest.mark.parametrize(
    ("name", "start"),
    [(name, "console script") for name in SCRIPTS] + [(name, "python -m") for name in WHERE_THE_START_COUNTS],
)
def test_a_script_runs_as_under_python(directory, name, start):
    arguments = [f"{name}.py", *ARGUMENTS.get(name, [])]

    assert run([*UNDER_GRADTRACE[start], *arguments], directory) == natively(directory, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["./arguments.py"],
        ["links/../arguments.py"],
        ["links/link.py"],
        ["compiled.pyc"],
        ["cp1252.py"],
        ["bom.py"],
        ["app", "--flag"],
        ["./app/"],
        ["app.zip", "--flag"],
        ["bare_package"],
        ["-m", "package", "--flag"],
        ["-m", "package.train", "--flag", "-m"],
        ["-m", "package.failing"],
        ["-m", "package.interrupted"],
        ["-m", "package.missing"],
        ["-m", "bare_package"],
        ["-m", "failing_package"],
        ["-m", "failing_package.train"],
        ["-m", "arguments", "x"],
        ["-m", "this"],
    ],
    ids=" ".join,
)
def test_whatever_python_can_run_runs_as_under_python(directory, arguments):
    assert run([*UNDER_GRADTRACE["console script"], *arguments], directory) == natively(directory, *arguments)


@pytest.mark.parametrize("flags", [["-I"], ["-O"], ["-W", "error"]] + [["-P"]] * (sys.version_info >= (3, 11)))
@pytest.mark.parametrize("script", ["arguments.py", "app", "assertion.py", "warning_in_main.py"])
def test_options_of_python_hold_for_the_script(directory, script, flags):
    recorded = run([sys.executable, *flags, "-m", "gradtrace", "record", script], directory)

    assert recorded == natively(directory, script, flags=tuple(flags))


def test_a_script_in_the_environment_of_a_safe_path_gets_no_directory_of_its_own(directory):
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    native = run([sys.executable, "arguments.py"], directory, env=environment)

    assert run([CONSOLE_SCRIPT, "record", "arguments.py"], directory, env=environment) == native


def test_a_script_whose_name_begins_with_a_dash_runs_after_a_double_dash(directory):
    (directory / "-odd.py").write_text("import sys; print(sys.argv)")

    assert run([CONSOLE_SCRIPT, "record", "--", "-odd.py", "-x"], directory).stdout == "['-odd.py', '-x']\n"


# --- signals: sent for real, when the script says that it is ready ---------------------------------------

WAITS = "import time; print('ready', flush=True); print('lost'); time.sleep(60)"
# The signal is held back until it is there, so that it always strikes the same line.
RECEIVES = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])
print("ready", flush=True)
print("lost if the signal kills")
while signal.{name} not in signal.sigpending():
    time.sleep(0)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.{name}])
"""
DIES = f"import signal, time{RECEIVES}"
HANDLES = f"""
import signal, sys, time
def handler(number, frame):
    print("handled", number)
    sys.exit(4)
signal.signal(signal.{{name}}, handler)
{RECEIVES}
"""
CHAINS = f"""
import signal, time
before = signal.getsignal(signal.{{name}})
def handler(number, frame):
    if callable(before):
        before(number, frame)
    raise ValueError("after the handler that was there before")
signal.signal(signal.{{name}}, handler)
{RECEIVES}
"""
IGNORES = """
import signal
signal.signal(signal.{name}, signal.SIG_IGN)
print("ready", flush=True)
print(input())
"""
JOINS = """
import threading, time
thread = threading.Thread(target=input, daemon=False)
thread.start()
print("ready", flush=True)
"""


def signalled(command, directory, number, *, typed=""):
    """Run a command, send it a signal once it has said ``ready``, return its outcome."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=directory,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:
        first = ""
        while not first.endswith("\n"):  # nothing beyond the line: the rest is for communicate()
            first += os.read(process.stdout.fileno(), 1).decode() or "\n"
        process.send_signal(number)
        try:
            stdout, stderr = process.communicate(typed, timeout=5)
        except subprocess.TimeoutExpired:
            # It came after Python's last look at signals and before the system call that it should end.
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=60)
    return Outcome(process.returncode, first + stdout, without_own_lines(stderr))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("source", [DIES, HANDLES, CHAINS, IGNORES], ids=["dies", "handles", "chains", "ignores"])
def test_a_signal_ends_the_script_as_under_python(tmp_path, source, name):
    (tmp_path / "script.py").write_text(source.replace("{name}", name))
    number = getattr(signal, name)
    native = signalled([sys.executable, "script.py"], tmp_path, number, typed="typed\n")

    assert native.stdout.startswith("ready\n")
    assert signalled([CONSOLE_SCRIPT, "record", "script.py"], tmp_path, number, typed="typed\n") == native


def test_a_script_that_only_waits_dies_of_the_signal_itself(tmp_path):
    (tmp_path / "script.py").write_text(WAITS)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        outcome = signalled([CONSOLE_SCRIPT, "record", "script.py"], tmp_path, number)
        assert outcome.code == -number


def test_a_script_started_under_nohup_survives_a_hangup(tmp_path):
    (tmp_path / "script.py").write_text("print('ready', flush=True); print(input())")
    command = ["sh", "-c", f"trap '' HUP; exec {CONSOLE_SCRIPT} record script.py"]

    assert signalled(command, tmp_path, signal.SIGHUP, typed="typed\n")[:2] == (0, "ready\ntyped\n")


# --- what the caller of run_script is told ---------------------------------------------------------------


def told(source, directory, *, number=None):
    """Run a script through ``run_script`` alone; what its callbacks were called with, in order."""
    (directory / "script.py").write_text(dedented(source))
    (directory / "told").write_text("")
    command = [sys.executable, str(DRIVER), "told", "script.py"]
    outcome = run(command, directory) if number is None else signalled(command, directory, number)
    return (directory / "told").read_text().splitlines(), outcome


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("pass", "completed"),
        ("import sys; sys.exit()", "completed"),
        ("import sys; sys.exit(0)", "completed"),
        ("import sys; sys.exit(3)", "exit 3"),
        ("import sys; sys.exit(True)", "exit 1"),
        ("import sys; sys.exit('bye')", "exit 1"),
        ("raise ValueError('x')", "exception ValueError"),
        ("class Own(BaseException): pass\nraise Own", "exception Own"),
        ("x = = 1", "exception SyntaxError"),
        ("raise KeyboardInterrupt", "signal SIGINT"),
    ],
)
def test_the_end_is_told_in_the_words_of_the_run(tmp_path, source, end):
    assert told(source, tmp_path)[0] == [f"end {end}"]


def test_the_end_comes_after_threads_and_exit_handlers(tmp_path):
    events, _ = told(
        """
        import atexit, threading
        def note(text):
            with open("told", "a") as file:
                print(text, file=file)
        def work():
            threading.main_thread().join()
            note("thread")
        atexit.register(note, "exit handler")
        threading.Thread(target=work).start()
        note("script")
        raise ValueError
        """,
        tmp_path,
    )

    assert events == ["script", "thread", "exit handler", "end exception ValueError"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_deadly_signal_is_told_once_and_the_end_is_not(tmp_path, name):
    events, outcome = told(WAITS, tmp_path, number=getattr(signal, name))

    assert events == [f"signal signal {name}"]
    assert outcome.code == -getattr(signal, name)


def test_a_deadly_signal_while_threads_are_awaited_is_told(tmp_path):
    events, outcome = told(JOINS, tmp_path, number=signal.SIGTERM)

    assert events == ["signal signal SIGTERM"]
    assert outcome.code == -signal.SIGTERM


SIGNALLED_AGAIN = """
import os, signal
from gradtrace.capture.script import Script, run_script
def told(how):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    print("told", how, flush=True)
run_script(Script("script.py"), on_end=told, on_signal=told)
"""


def test_more_signals_do_not_interrupt_what_is_done_because_of_the_first(tmp_path):
    (tmp_path / "script.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)")

    assert run([sys.executable, "-c", SIGNALLED_AGAIN], tmp_path) == (-signal.SIGTERM, "told signal SIGTERM\n", "")


def test_an_interrupt_is_told_as_the_end(tmp_path):
    events, outcome = told(WAITS, tmp_path, number=signal.SIGINT)

    assert events == ["end signal SIGINT"]
    assert outcome.code == -signal.SIGINT


def test_a_handler_of_the_script_keeps_the_signal_to_itself(tmp_path):
    events, outcome = told(HANDLES.replace("{name}", "SIGTERM"), tmp_path, number=signal.SIGTERM)

    assert events == ["end exit 4"]
    assert outcome.code == 4


def test_a_forked_child_tells_nothing(tmp_path):
    events, outcome = told(
        """
        import os, sys
        for _ in range(2):
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            else:
                sys.exit(8)
        sys.exit(2)
        """,
        tmp_path,
    )

    assert events == ["end exit 2"]
    assert outcome.code == 2


def test_a_process_that_leaves_at_once_tells_nothing(tmp_path):
    assert told("import os; os._exit(7)", tmp_path)[0] == []
