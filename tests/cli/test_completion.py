"""Shell completion: what is offered for a line that is half typed, asked as the shells ask it."""

import os
import pty
import re
import select
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import click
import pytest
from gradtrace_cli.main import cli

SCRIPTS = sysconfig.get_path("scripts")
COMMANDS = cli.list_commands(click.Context(cli))
NOT_A_PATH = {"query"}


def offered(line):
    """What bash is told for a line, of which the last word is being typed: pairs of a kind and a word."""
    words = line.split(" ")
    environment = os.environ | {
        "_GRADTRACE_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len([word for word in words[:-1] if word])),
    }
    done = subprocess.run(
        [Path(SCRIPTS, "gradtrace")], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return [tuple(row.split(",", 1)) for row in done.stdout.splitlines() if row]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gradtrace ", COMMANDS),
        ("gradtrace re", ["record", "recheck", "report"]),
        ("gradtrace record --watch-s", ["--watch-spike-factor", "--watch-spike-window", "--watch-share"]),
        ("gradtrace recheck --j", ["--json"]),
        ("gradtrace export run.parquet --te", ["--tensorboard"]),
        ("gradtrace summary --by ", ["module", "step", "type"]),
        ("gradtrace sql run.parquet -f js", ["json", "jsonl"]),
        ("gradtrace sql run.parquet sel", []),
    ],
)
def test_commands_options_and_choices_are_completed(line, words):
    assert offered(line) == [("plain", word) for word in words]


@pytest.mark.parametrize(
    "line",
    [
        "gradtrace first-nan ru",
        "gradtrace first-nan --json ru",
        "gradtrace record -m ru",
        "gradtrace record -o ru",
        "gradtrace record train.py ru",
        "gradtrace recheck run.capsule.pt ru",
        "gradtrace export run.parquet --tensorboard ru",
    ],
)
def test_files_are_left_to_the_shell(line):
    assert offered(line) == [("file", "ru")]


@pytest.mark.parametrize(
    "line", ["gradtrace record --watch train.py --wa", "gradtrace recheck run.capsule.pt train.py --j"]
)
def test_after_the_script_no_option_of_ours_is_offered(line):
    assert [kind for kind, _ in offered(line)] == ["file"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_of_every_command_is_a_path_but_the_query(name):
    command = cli.get_command(click.Context(cli), name)
    context = click.Context(command, info_name=name)
    kinds = {
        param.name: [item.type for item in param.shell_complete(context, "ru")]
        for param in command.params
        if isinstance(param, click.Argument)
    }
    assert kinds == {argument: [] if argument in NOT_A_PATH else ["file"] for argument in kinds}


def test_an_argument_may_be_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    """Whether the script can read what it is given is the script's own business."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    command = cli.get_command(click.Context(cli), "record")
    (given,) = (param for param in command.params if param.name == "args")
    assert given.type_cast_value(click.Context(command), (str(tmp_path),)) == (str(tmp_path),)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_the_code_that_asks(shell):
    environment = os.environ | {"_GRADTRACE_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-m", "gradtrace"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)

    assert f"_GRADTRACE_COMPLETE={shell}_complete" in done.stdout


def test_completing_loads_nothing_heavy():
    code = """
import os, sys
os.environ |= {"_GRADTRACE_COMPLETE": "bash_complete", "COMP_WORDS": "gradtrace ", "COMP_CWORD": "1"}
from gradtrace_cli.main import main
assert main([]) == 0
print(sorted({"torch", "duckdb", "pyarrow", "rich", "plotly", "tensorboard", "pandas"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


class Bash:
    """A bash that someone types into."""

    def __init__(self, folder):
        path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "TERM": "dumb", "PS1": "", "HISTFILE": "", "HOME": str(folder)}
        self._terminal, terminal = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)

    def type(self, keys, until):
        """Type, then wait for what matches ``until``."""
        os.write(self._terminal, keys.encode())
        seen, deadline = "", time.monotonic() + 60
        while not re.search(until, seen):
            assert time.monotonic() < deadline, seen
            if select.select([self._terminal], [], [], 1)[0]:
                seen += os.read(self._terminal, 4096).decode()

    def close(self):
        os.close(self._terminal)
        self._process.kill()
        self._process.wait()


def test_a_real_bash_completes_commands_options_and_files(tmp_path):
    (tmp_path / "long_name_of_a_run.parquet").touch()
    bash = Bash(tmp_path)
    try:
        bash.type('eval "$(_GRADTRACE_COMPLETE=bash_source gradtrace)"; echo re""ady\n', "ready")
        bash.type("gradtrace summ\t", "gradtrace summary ")
        bash.type("--dep\t", "--depth ")
        bash.type("3 long\t", r"3 long_name_of_a_run\.parquet ")
    finally:
        bash.close()
