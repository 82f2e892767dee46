"""The frame of the command line: help, errors in one line, exit codes, and what must not be imported."""

import os
import re
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import click
import pytest
from gradtrace_cli import main as main_module
from gradtrace_cli.main import main
from traces import write_run

import gradtrace
from gradtrace import errors
from gradtrace.trace.schema import Record

CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts"), "gradtrace"))
HEAVY = ["torch", "duckdb", "pyarrow", "rich", "plotly", "tensorboard", "pandas"]
COMMANDS = list(main_module._COMMANDS)


@pytest.fixture
def fail_with(monkeypatch):
    """Make ``gradtrace sql`` raise, or do, something else."""

    def replace(action):
        module = ModuleType("commands_of_this_test")
        module.command = click.command("sql")(action)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(main_module._COMMANDS, "sql", f"{module.__name__}:command")

    return replace


def raising(error):
    def action():
        raise error

    return action


# --- errors and exit codes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RunNotFoundError("it is so"), 3),
        (errors.NotARunError("it is so"), 3),
        (errors.QueryError("it is so"), 3),
        (errors.NoMatchError("it is so"), 3),
        (errors.CaptureError("it is so"), 2),
        (errors.RunExistsError("it is so"), 2),
        (errors.GradtraceError("it is so"), 2),
        (click.ClickException("It\nis so"), 2),
        (OSError(28, "it is so"), 3),
    ],
)
def test_every_error_is_one_line_with_its_exit_code(fail_with, capsys, error, code):
    fail_with(raising(error))

    assert (main(["sql"]), *capsys.readouterr()) == (code, "", "gradtrace: error: it is so\n")


def test_a_usage_error_leads_to_the_help_of_the_command(fail_with, capsys):
    fail_with(raising(click.UsageError("It is so.")))

    assert main(["sql"]) == 2
    assert capsys.readouterr().err == "gradtrace: error: it is so; see: gradtrace sql --help\n"


def test_an_error_of_the_system_names_the_file(fail_with, capsys):
    fail_with(raising(PermissionError(13, "Permission denied", "run.parquet")))

    assert main(["sql"]) == 3
    assert capsys.readouterr().err == "gradtrace: error: run.parquet: Permission denied\n"


def test_what_no_one_foresaw_keeps_its_traceback(fail_with):
    fail_with(raising(AssertionError("a mistake of ours")))

    with pytest.raises(AssertionError, match="a mistake of ours"):
        main(["sql"])


def test_an_interrupt_is_silent_and_130(fail_with, capsys):
    fail_with(raising(KeyboardInterrupt()))

    assert (main(["sql"]), *capsys.readouterr()) == (130, "", "")


@pytest.mark.parametrize(("action", "code"), [(lambda: 1, 1), (lambda: None, 0), (lambda: "text", 0)])
def test_a_command_chooses_its_exit_code_by_what_it_returns(fail_with, action, code):
    fail_with(action)

    assert main(["sql"]) == code


def test_a_command_may_exit_through_click(fail_with):
    fail_with(lambda: click.get_current_context().exit(1))

    assert main(["sql"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["summry"], "no such command: summry; did you mean summary? See: gradtrace --help"),
        (["xyz"], "no such command: xyz; see: gradtrace --help"),
        (["train.py"], "no such command: train.py; did you mean record train.py? See: gradtrace --help"),
        (
            ["old.parquet"],
            "no such command: old.parquet; did you mean first-nan old.parquet? See: gradtrace --help",
        ),
        (["--versoin"], "no such option: --versoin; did you mean --version? See: gradtrace --help"),
    ],
)
def test_typing_errors_come_with_what_was_meant(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.parquet").write_text("")

    assert (main(arguments), *capsys.readouterr()) == (2, "", f"gradtrace: error: {message}\n")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("first-nan", ["run.parquet", "--jsno"], "no such option: --jsno; did you mean --json?"),
        ("summary", ["run.parquet", "--dpeth", "2"], "no such option: --dpeth; did you mean --depth?"),
        ("record", ["--evry", "2", "train.py"], "no such option: --evry; did you mean --every?"),
        ("export", ["run.parquet", "--tensorbord", "x"], "no such option: --tensorbord; did you mean --tensorboard?"),
        ("sql", ["run.parquet", "--xyz"], "no such option: --xyz;"),
        (
            "sql",
            ["run.parquet", "-f", "tabel", "select 1"],
            "invalid value for '-f' / '--format': 'tabel' is not one of 'table', 'csv', 'json', 'jsonl', 'markdown'; "
            "did you mean table?",
        ),
        (
            "summary",
            ["run.parquet", "--by", "color"],
            "invalid value for '--by': 'color' is not one of 'module', 'step', 'type';",
        ),
        ("sql", ["run.parquet", "--rows", "-2"], "invalid value for '--rows': -2 is not in the range x>=-1;"),
    ],
)
def test_typing_errors_of_a_command_come_with_what_was_meant(capsys, name, arguments, message):
    see = "See" if message.endswith("?") else "see"
    expected = f"gradtrace: error: {message} {see}: gradtrace {name} --help\n"

    assert (main([name, *arguments]), *capsys.readouterr()) == (2, "", expected)


def test_without_a_command_all_of_the_help_is_shown_and_it_was_a_usage_error(capsys):
    main(["--help"])
    help_text = capsys.readouterr().out

    assert (main([]), *capsys.readouterr()) == (2, "", help_text)
    assert help_text.startswith("Usage: gradtrace [OPTIONS] COMMAND [ARGS]...")


@pytest.mark.parametrize("name", [[], ["sql"], ["first-nan"]])
def test_help_is_an_option_and_may_be_asked_for_as_a_command(capsys, name):
    main([*name, "--help"])
    help_text = capsys.readouterr().out

    assert (main(["help", *name]), *capsys.readouterr()) == (0, help_text, "")


def test_help_for_what_there_is_not_is_an_error(capsys):
    assert main(["help", "summry"]) == 2
    message = "no such command: summry; did you mean summary? See: gradtrace --help"
    assert capsys.readouterr() == ("", f"gradtrace: error: {message}\n")


def test_a_reader_that_has_left_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([CONSOLE_SCRIPT, "record", "--help"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)

    assert (done.returncode, done.stderr) == (141, "")


# --- help ------------------------------------------------------------------------------------------------


def test_help_lists_the_commands_in_the_order_of_use(capsys):
    assert main(["-h"]) == 0

    text = capsys.readouterr().out
    assert re.findall(r"^(?:\w+:$|  [a-z-]+(?=  ))", text, re.MULTILINE) == [
        "Options:",
        "Record:",
        "  record",
        "  recheck",
        "Ask:",
        "  first-nan",
        "  summary",
        "  sql",
        "  diff",
        "  check",
        "Share:",
        "  report",
        "  export",
    ]
    assert text.endswith(
        """
  Example:
    $ gradtrace record train.py --lr 3e-4
    $ gradtrace first-nan run.parquet
    $ gradtrace sql run.parquet "select module, max(norm) from grads group by 1"

  Exit codes:
    0 done    1 found something (only with --exit-code)    2 usage
    3 bad file or query    130 interrupted
    `record` exits as the script did.
"""
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example_and_says_one_thing_a_line(capsys, command):
    assert main([command, "-h"]) == 0

    text = capsys.readouterr().out
    assert text.startswith(f"Usage: gradtrace {command} [OPTIONS] ")
    assert f"$ gradtrace {command} " in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_is_that_of_the_package(capsys, option):
    assert main([option]) == 0
    assert capsys.readouterr().out == f"gradtrace {gradtrace.__version__}\n"


def test_python_m_exits_with_the_code_of_the_command():
    command = [sys.executable, "-m", "gradtrace", "record", "no_such_script.py"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    message = "gradtrace: error: no such script: no_such_script.py\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_python_m_is_the_same_program():
    command = [sys.executable, "-m", "gradtrace", "--version"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, f"gradtrace {gradtrace.__version__}\n")


# --- imports ---------------------------------------------------------------------------------------------


def loaded_after(code, modules):
    """Which of the modules are loaded after the code has run in a fresh Python."""
    code += f"\nimport sys; print([m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import gradtrace", HEAVY),
        ("import gradtrace_cli.main", HEAVY),
        ("import gradtrace.capture.script", HEAVY),
        ("from gradtrace_cli.main import main; main(['--help'])", HEAVY),
        ("from gradtrace_cli.main import main; main(['--version'])", HEAVY),
        *((f"from gradtrace_cli.main import main; main([{name!r}, '--help'])", HEAVY) for name in COMMANDS),
        ("import gradtrace.analysis.run", ["torch", "rich"]),
        ("from gradtrace import open_run", ["torch", "rich"]),
        ("import gradtrace.capture.tracer", ["duckdb", "rich"]),
        ("import gradtrace.trace.writer", ["torch", "duckdb", "rich"]),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code, modules):
    assert loaded_after(code, modules) == "[]"


@pytest.mark.parametrize("arguments", [["first-nan", "--json"], ["first-nan"], ["summary"]], ids=" ".join)
def test_questions_to_a_finished_file_need_no_arrow(tmp_path, arguments):
    row = Record(0, 0, "loss", "loss", numel=1, nan_count=1, posinf_count=0, neginf_count=0)
    path = write_run(tmp_path / "run.parquet", [row])
    code = f"from gradtrace_cli.main import main; assert main({[*arguments, str(path)]!r}) == 0"
    assert loaded_after(code, ["torch", "numpy", "pyarrow", "pandas"]) == "[]"


def processor_time(command):
    """Seconds of processor time of a command, the least of five runs."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_costs_little_more_than_click_itself():
    assert processor_time([CONSOLE_SCRIPT, "--help"]) < 2 * processor_time([sys.executable, "-c", "import click"])
