"""The frame of the command line: the commands in their order, errors in one line, exit codes.

A command is loaded when it is asked for (all of them for ``--help``), so command modules import nothing heavy
at their head.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

import gradtrace
from gradtrace.errors import (
    CapsuleError,
    GradtraceError,
    NoMatchError,
    NotARunError,
    QueryError,
    RunNotFoundError,
)

from .lines import open_streams, say
from .record_plan import RecordPlan

_SECTIONS = {
    "Record": {"record": ".record:record", "recheck": ".recheck:recheck"},
    "Ask": {
        "first-nan": ".first_nan:first_nan",
        "summary": ".summary:summary",
        "sql": ".sql:sql",
        "diff": ".diff:diff",
        "check": ".check:check",
    },
    "Share": {"report": ".report:report", "export": ".export:export"},
}
_COMMANDS = {name: place for section in _SECTIONS.values() for name, place in section.items()}
_READING = frozenset({*_SECTIONS["Ask"], *_SECTIONS["Share"]})

_MOST_FILES = 10_240  # where there is no limit; macOS takes no more

_COMPLETE = "_GRADTRACE_COMPLETE"  # click's name for it
_DUCKDB_INTERRUPTED = "Query interrupted"  # what DuckDB makes of Ctrl-C

EXIT_USAGE = 2
EXIT_BAD_DATA = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports of a program that SIGPIPE killed
_BAD_DATA = (RunNotFoundError, NotARunError, CapsuleError, QueryError, NoMatchError)


class _Commands(click.Group):
    """A group that loads its commands late and lists them in the order in which one uses them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module, __package__), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"no such command: {name}{_meant_command(name)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for title, names in _SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(limit=1000))  # wrapped, not cut
                        for name, command in commands
                        if command is not None
                    ]
                )


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Example:
  $ gradtrace record train.py --lr 3e-4
  $ gradtrace first-nan run.parquet
  $ gradtrace sql run.parquet "select module, max(norm) from grads group by 1"

\b
Exit codes:
  0 done    1 found something (only with --exit-code)    2 usage
  3 bad file or query    130 interrupted
  `record` exits as the script did.""",
)
@click.version_option(gradtrace.__version__, "-V", "--version", message="gradtrace %(version)s")
def cli() -> None:
    """Record what every module of a PyTorch training run computes, then ask the recording where the first
    NaN or Inf was born.

    RUN is a recording: a file, the directory of several ranks, or a glob.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``record`` ends as the script ends.

    ``arguments`` are those after the program's name, by default the process's own. A shell that completes a line asks
    by way of the environment.

    Raises:
        BaseException: under ``record``, what the script did not catch, for the interpreter to show.
    """
    with open_streams():
        outcome = _outcome(arguments)
    if isinstance(outcome, RecordPlan):
        from . import recording

        # From here on the script is alone: neither click nor an except clause of ours stands below it.
        recording.run(outcome)
    return outcome if isinstance(outcome, int) else 0


def _outcome(arguments: Sequence[str] | None) -> Any:
    """Return the exit code of a command, or the plan of a recording."""
    if arguments is None and sys.argv[1:2] and sys.argv[1] in _READING:
        _allow_many_files()
        gc.disable()  # facts of a million modules are no garbage, however often the collector looks at all of them
    if arguments is None and sys.argv[1:2] == ["sql"] and not os.environ.get(_COMPLETE):
        from .apart import run_apart

        return run_apart(lambda: main(sys.argv[1:]))
    try:
        if instruction := os.environ.get(_COMPLETE):
            return _complete(instruction)
        outcome = _ask_click(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        if str(error) != _DUCKDB_INTERRUPTED:
            raise
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains as it exits
        return EXIT_BROKEN_PIPE
    except (GradtraceError, click.ClickException, OSError) as error:
        return _report(error)
    return outcome


def _allow_many_files() -> None:
    """Let this process have as many files open as it may: several ranks that were killed have some thousand pieces."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard >= 0 else _MOST_FILES
    if 0 <= soft < most:
        with suppress(OSError, ValueError):  # a system may have a limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _ask_click(arguments: list[str]) -> Any:
    """Return what the command returns, or the exit code that it asked for. ``help NAME`` is ``NAME --help``.

    Not ``cli.main()``: that has exit codes and last words of its own for Ctrl-C, EOFError and closed pipes.
    """
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        with cli.make_context("gradtrace", arguments) as context:
            return cli.invoke(context)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code


def _complete(instruction: str) -> int:
    """Print the completions that the shell asks for, or the code that makes it ask; return the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(cli, {}, "gradtrace", _COMPLETE, instruction)


def _report(error: Exception) -> int:
    """Say in one line on stderr what was wrong; return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return EXIT_USAGE
    code = EXIT_BAD_DATA if isinstance(error, (*_BAD_DATA, OSError)) else EXIT_USAGE
    # Only what DuckDB says of a query has lines of its own.
    first, *more = (_in_words(error).splitlines() if isinstance(error, QueryError) else [_in_words(error)]) or [""]
    say(f"gradtrace: error: {first}")
    for text in more:
        say(text)
    return code


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if not isinstance(error, click.ClickException):
        return str(error)
    words = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        words = f"no such option: {error.option_name}{_meant(error.possibilities or [])}"
    if isinstance(error, click.BadParameter):
        words += _meant(_close_choices(error))
    words = words[:1].lower() + words[1:]
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return words
    return f"{words}{' See' if words.endswith('?') else '; see'}: {error.ctx.command_path} --help"


def _close_choices(error: click.BadParameter) -> list[str]:
    """Return the choices of an option that come close to what was given."""
    import difflib
    import re

    given = re.match(r"'(.*)' is not one of", error.message)
    kind = error.param.type if error.param is not None else None
    if given is None or not isinstance(kind, click.Choice):
        return []
    return difflib.get_close_matches(given[1], map(str, kind.choices))


def _meant(candidates: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _meant_command(name: str) -> str:
    import difflib

    if os.path.exists(name) or name.endswith(".py"):
        return _meant([f"{'record' if name.endswith('.py') else 'first-nan'} {name}"])
    return _meant(difflib.get_close_matches(name, _COMMANDS, n=1))
