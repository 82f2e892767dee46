"""A recording full of hostile names, asked by every command: nothing acts on a terminal, all names can be read back."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradtrace_cli import main as main_module
from gradtrace_cli.main import main
from markdown_it import MarkdownIt

from gradtrace.analysis.run import open_run
from gradtrace.errors import GradtraceWarning, NonFiniteError, NotARunError, QueryError
from gradtrace.printable import MOST_SHOWN, printable, shell_word, shortened, width
from tests.hostile import ALL, COMMAND, ESCAPES, LINES, LONG, NAMES, write_hostile_run

VIEWS = ("records", "params", "grads", "steps", "modules", "events", "meta")
OF_A_PATH = ALL.replace("\0", "").replace("/", "")[:120]
"""What of it can be the name of a folder."""
PROGRESS = ("\r\x1b[K",)
"""What the progress bar writes to a terminal; nobody names it."""


class Stream(io.StringIO):
    """A terminal, or none."""

    def __init__(self, *, is_terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        text.encode(self._encoding)
        return super().write(text)


class Said:
    """What a command wrote, and its exit code."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *arguments: str, is_terminal: bool = False, **options: Any
    ) -> None:
        streams = [Stream(is_terminal=is_terminal, **options) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            self.code = main(arguments)
        self.out, self.err = (stream.getvalue() for stream in streams)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("hostile") / OF_A_PATH
    folder.mkdir()
    first = write_hostile_run(folder / "run.parquet")
    other = write_hostile_run(folder / "other.parquet", names=(*NAMES[:5][::-1], *NAMES[9:]), scale=3.0)
    return str(first), str(other)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments, **options: Said(monkeypatch, *arguments, **options)


def commands(run: str, other: str, folder: Path) -> dict[str, list[list[str]]]:
    """Return for each command of the program what it is asked here, for people to read."""
    return {
        "first-nan": [[run], ["--skipped", run], ["--rank", "9", run], [f"{run}{ALL}".replace("\0", "")]],
        "summary": [
            [run],
            ["--depth", "0", run],
            ["--by", "type", run],
            ["--by", "step", run],
            [run, "-f", "markdown"],
        ],
        "sql": [
            *([run, f"select * from {view}"] for view in VIEWS),
            [run, "select module from modules", "-f", "markdown"],
            [run, "select module::int from modules"],
            [run, f"select '{LINES}' as \"{ALL.replace(chr(0), '').replace(chr(34), '')}\""],
            [run, ALL],
        ],
        "check": [[run], [run, "-f", "markdown"], [run, "--rule", ALL], [run, "--set", f"{ALL}=1"]],
        "diff": [[run, other], [other, run, "-M", ALL]],
        "export": [[run, "--tensorboard", str(folder / OF_A_PATH)]],
        "report": [[run, "-o", str(folder / f"{OF_A_PATH}.html")], [run, "-o", f"{folder}/{OF_A_PATH}/{OF_A_PATH}/x"]],
        "record": [["--engine", ALL, "x.py"], [f"{OF_A_PATH}.py"]],
        "recheck": [[f"{OF_A_PATH}.pt", "x.py"]],
        "help": [[ALL]],
    }


def assert_fit_to_be_shown(text: str) -> None:
    for own in PROGRESS:
        text = text.replace(own, "")
    assert {letter for letter in text if letter != "\n" and not letter.isprintable()} == set()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_no_command_writes_what_a_terminal_would_act_on(
    say: Any, runs: tuple[str, str], tmp_path: Path, is_terminal: bool
) -> None:
    asked = commands(*runs, tmp_path)
    assert asked.keys() == {*main_module._COMMANDS, "help"}
    wrote = 0
    for command, several in asked.items():
        for arguments in several:
            said = say(command, *arguments, is_terminal=is_terminal)
            assert_fit_to_be_shown(said.out)
            assert_fit_to_be_shown(said.err)
            assert said.out or said.err
            assert "Traceback" not in said.err
            wrote += len(said.out) + len(said.err)
            if is_terminal:
                assert max(map(len, said.out.splitlines()), default=0) <= 3 * MOST_SHOWN  # two names and the rest
    assert wrote > 50_000


def test_data_for_programs_is_escaped_where_a_terminal_shows_it(say: Any, runs: tuple[str, str]) -> None:
    for form in ("csv", "json", "jsonl"):
        assert_fit_to_be_shown(
            say("sql", runs[0], "select module, type from modules", "-f", form, is_terminal=True).out
        )
    for arguments in (["first-nan", "--json", runs[0]], ["diff", "--json", *runs]):
        assert_fit_to_be_shown(say(*arguments).out)


def test_every_door_to_the_terminal_is_the_one() -> None:
    """What is not in here cannot have been forgotten."""
    folder = Path(main_module.__file__).parent
    door = re.compile(r"click\.echo|secho|(?<![.\w])print\(|std(?:out|err)\.write")
    found = {
        (file.name, name)
        for file in folder.glob("*.py")
        for name in door.findall(file.read_text(encoding="utf-8"))
        if file.name != "lines.py"
    }
    assert found == {("progress.py", "stderr.write")}  # a bar, which has no name in it


def test_a_row_is_a_line_whatever_is_in_it(say: Any, runs: tuple[str, str]) -> None:
    lines = say("sql", runs[0], "select module, number from modules order by number").out.splitlines()
    assert len(lines) == len(NAMES) + 3
    assert [int(line.split()[-1]) for line in lines[2:]] == list(range(len(NAMES) + 1))
    assert lines[3 + NAMES.index(LINES)].startswith(printable(LINES) + " ")


def test_csv_reads_back_to_the_very_names(say: Any, runs: tuple[str, str]) -> None:
    csv.field_size_limit(2 * len(LONG))
    text = say("sql", runs[0], "select module, type, file from modules order by number", "-f", "csv").out
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert [row[0] for row in rows] == ["module", "", *NAMES]
    assert rows[1][1:] == [ALL, ALL]
    assert {len(row) for row in rows} == {3}
    summed = say("summary", runs[0], "-f", "csv").out
    assert [row[0] for row in csv.reader(io.StringIO(summed, newline=""))] == ["module", "", *NAMES]


def test_json_reads_back_to_the_very_names(say: Any, runs: tuple[str, str]) -> None:
    query = "select module from modules order by number"
    assert [row["module"] for row in json.loads(say("sql", runs[0], query, "-f", "json").out)] == ["", *NAMES]
    lines = say("sql", runs[0], query, "-f", "jsonl").out.split("\n")
    assert [json.loads(line)["module"] for line in lines[:-1]] == ["", *NAMES]
    verdict = json.loads(say("first-nan", "--json", runs[0]).out)
    assert (verdict["module"], verdict["path"], verdict["op"]) == (ALL, ALL, f"aten.{ALL}")
    assert verdict["traceback"][0]["file"] == f"{ALL}.py"
    difference = json.loads(say("diff", "--json", *runs).out)
    assert difference["a"]["command"][:2] == [f"{ALL}.py", ESCAPES]


def test_json_is_json_in_every_encoding(say: Any, runs: tuple[str, str]) -> None:
    query = "select module from modules order by number"
    said = say("sql", runs[0], query, "-f", "json", encoding="ascii")
    assert [row["module"] for row in json.loads(said.out)] == ["", *NAMES]
    for form in ("table", "markdown", "csv"):
        assert "\\u65e5" in say("sql", runs[0], query, "-f", form, encoding="ascii").out


@pytest.mark.filterwarnings("ignore")
def test_markdown_is_read_as_the_name_and_as_no_markup(say: Any, runs: tuple[str, str]) -> None:
    text = say(
        "sql", runs[0], "select module from modules where len(module) < 9999 order by number", "-f", "markdown"
    ).out
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    cells = [token for token in tokens if token.type == "inline"]
    kinds = {child.type for cell in cells for child in cell.children or []}
    assert kinds <= {"text", "text_special"}
    shown = ["".join(child.content for child in cell.children or []) for cell in cells]
    assert shown == ["module", "", *(printable(name).strip() for name in NAMES if name != LONG)]


def test_sql_finds_every_name(runs: tuple[str, str]) -> None:
    counts = (
        "(select count(*) from records where module = '{}' and tensor = 'output' and op is null)".format(
            name.replace("'", "''")
        )
        for name in NAMES
    )
    with open_run(runs[0]) as run:
        assert run.sql(f"select {', '.join(counts)}").rows == [(4,) * len(NAMES)]


def test_a_name_that_is_one_of_our_words_is_told_from_it(say: Any, runs: tuple[str, str]) -> None:
    lines = say("summary", runs[0]).out.splitlines()
    names = [line.split("   ")[0].strip() for line in lines]
    assert names.count("(root)") == names.count('"(root)"') == names.count('"outside any module"') == 1


def test_a_terminal_gets_the_ends_of_a_long_name_and_a_pipe_all_of_it(say: Any, runs: tuple[str, str]) -> None:
    query = f"select module from modules where len(module) = {len(LONG)}"
    shown = say("sql", runs[0], query, is_terminal=True).out
    assert len(shown) < 2 * MOST_SHOWN
    assert f"({len(LONG):,} characters)" in " ".join(shown.split())
    assert say("sql", runs[0], query).out.splitlines()[2] == LONG


def test_the_library_is_as_careful_as_the_command_line(runs: tuple[str, str]) -> None:
    with open_run(runs[0]) as run, open_run(runs[1]) as other:
        answers = [run.first_nan(), run.summary(), run.check(), run.diff(other), run.sql("from modules"), run]
        texts = [text for answer in answers for text in (str(answer), repr(answer))]
        pages = [answer._repr_html_() for answer in answers]
    for text in texts:
        assert_fit_to_be_shown(text)
    for page in pages:
        assert "<script" not in page and "<img" not in page and "\0" not in page


@pytest.mark.parametrize("kind", [NotARunError, GradtraceWarning, lambda text: NonFiniteError(text, 3)])
def test_errors_and_warnings_are_one_line(kind: Any) -> None:
    assert str(kind(ALL)) == printable(ALL)


def test_what_duckdb_says_keeps_its_lines_and_nothing_else() -> None:
    assert str(QueryError("a\nb\x1b")) == "a\nb\\x1b"


@pytest.mark.parametrize("text", [ALL.replace("\0", ""), COMMAND, "plain.parquet", "", "caf\udce9", "'", "\\\n"])
def test_a_command_to_be_pasted_has_the_name_as_one_word(text: str, tmp_path: Path) -> None:
    word = shell_word(text)
    assert word.isprintable()
    program = f"printf %s {word}"
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == text.encode(errors="surrogateescape")
    assert list(tmp_path.iterdir()) == []
    if text.isprintable():
        assert shlex.split(word) == [text]


def test_the_command_that_a_verdict_gives_cannot_have_options_of_ours(tmp_path: Path) -> None:
    for command, expected in ((["-o", "/etc/passwd", "--force", "x.py"], "SCRIPT"), (["-m", "a b"], "-m 'a b'")):
        path = write_hostile_run(
            tmp_path / f"{len(expected)}.parquet", names=("a",), command=command, config={"include": ["x"]},
            modules=[gradtrace_module("", True), gradtrace_module("a"), gradtrace_module("a.b")],
        )  # fmt: skip
        with open_run(path) as run:
            [candidate, *_] = run.first_nan().candidates
        assert candidate.next.startswith("gradtrace record --steps 3:4 " + expected)


def gradtrace_module(name: str, root: bool = False) -> Any:
    from gradtrace.trace.runinfo import ModuleInfo

    return ModuleInfo(name, "Linear", root=root, calls=0 if name == "a.b" else 4)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [8, 2] \xe9 \u65e5", "plain [8, 2] \xe9 \u65e5"),
        ("a\tb\nc", "a\\tb\\nc"),
        ("\x1b[2J\x9b\x7f\0", "\\x1b[2J\\x9b\\x7f\\x00"),
        ("\u202e\u200b\u2028\ufeff", "\\u202e\\u200b\\u2028\\ufeff"),
        ("\ud800\udcff\U000e0001", "\\ud800\\udcff\\U000e0001"),
    ],
)
def test_what_is_no_visible_character_is_shown_as_pythons_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_long_text_keeps_both_ends() -> None:
    text = shortened("a" * 5_000 + "end")
    assert text.startswith("aaa") and text.endswith("end") and "(5,003 characters)" in text
    assert shortened("a" * MOST_SHOWN) == "a" * MOST_SHOWN


def test_widths_are_those_of_a_terminal() -> None:
    assert [width(text) for text in ("abc", "\u65e5\u672c", "e\u0301", "")] == [3, 4, 1, 0]


def test_a_table_of_very_many_modules_says_how_to_see_them_all(say: Any, runs: tuple[str, str]) -> None:
    said = say("summary", runs[0], "--rows", "3")
    table = said.out[said.out.index("module  ") :].splitlines()
    assert len(table) == 2 + 3
    assert (
        f"gradtrace: note: the first 3 of {len(NAMES) + 1} rows; pass --rows -1 for all, "
        "--depth N to fold the deeper ones\n"
    ) in said.err
    assert len(say("summary", runs[0], "--rows", "-1").out.splitlines()) == len(NAMES) + 1 + 5
