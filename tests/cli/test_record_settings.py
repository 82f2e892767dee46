"""``gradtrace record`` and its configuration: what comes from where, what is refused, how the help lists it."""

import os
import re

import pytest
from click.testing import CliRunner
from gradtrace_cli.main import cli, main

from gradtrace.capture.watch.triggers import Triggers
from gradtrace.settings import SETTINGS
from tests.cli.test_record import record, started_with

TORCH = "import torch"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GRADTRACE")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def configure(directory, table):
    (directory / "pyproject.toml").write_text(f"[tool.gradtrace]\n{table}\n")


def test_an_option_is_above_a_variable_above_the_file_above_the_default(directory):
    configure(directory, "mode = 'watch'\nevery = 2\nreplays = 2\nfirst_step = 2\nwatch_first = 9\ninclude = ['a']")

    asked = started_with(record(directory, TORCH, "--every", "4", GRADTRACE_EVERY="3", GRADTRACE_REPLAYS="3"))

    assert [asked[key] for key in ("every", "replays", "first_step", "include", "mode")] == [4, 3, 2, ("a",), "watch"]
    assert asked["triggers"] == Triggers(first=9)


@pytest.mark.parametrize(
    ("table", "options", "key", "value"),
    [
        ("mode = 'full'", ["--watch"], "mode", "watch"),
        ("include = ['a', 'b']", ["--include", "c"], "include", ("c",)),
        ("loss_lines = false", ["--loss-lines"], "loss_lines", True),
        ("loss_lines = false", [], "loss_lines", False),
        ("capsule_limit = '2GiB'", ["--no-capsule"], "capsule_limit", 0),
        ("capsule_limit = 0", ["--capsule-limit", "5"], "capsule_limit", 5),
        ("steps = '1:2'", ["--steps", "0:"], "steps", (0, None)),
        ("max_size = '1MB'", ["--max-size", "0"], "max_size", 0),
    ],
)
def test_an_option_overrides_what_is_configured(directory, table, options, key, value):
    configure(directory, table)

    assert started_with(record(directory, TORCH, *options))[key] == value


def test_full_overrides_a_configured_watch_and_what_is_configured_for_it_does_no_harm(directory):
    configure(directory, "mode = 'watch'\nwatch_first = 9\nbaseline = 'gone.parquet'")

    asked = started_with(record(directory, TORCH, "--full"))

    assert asked.get("mode", "full") == "full"


def test_the_switch_of_blocks_says_nothing_to_record(directory):
    asked = started_with(record(directory, TORCH, "--watch", GRADTRACE="off"))

    assert asked["mode"] == "watch"


def test_a_baseline_is_that_of_the_directory_where_record_was_called(directory):
    (directory / "elsewhere").mkdir()
    (directory / "old.parquet").write_text("")

    done = record(directory, f"import os; os.chdir('elsewhere'); {TORCH}", "--watch", "--baseline", "old.parquet")

    assert started_with(done)["baseline"] == str(directory / "old.parquet")


def test_a_baseline_may_be_the_run_that_is_about_to_be_moved_aside(directory):
    (directory / "run.parquet").write_text("")

    asked = started_with(record(directory, TORCH, "--watch", "--baseline", "run.parquet"))

    assert (asked["existing"], asked["baseline"]) == ("move_aside", asked["path"])


def test_an_unfinished_run_is_a_baseline(directory):
    (directory / "old.parquet.parts").mkdir()

    asked = started_with(record(directory, TORCH, "--watch", "--baseline", "old.parquet"))

    assert asked["baseline"] == str(directory / "old.parquet")


SEE = "; see: gradtrace record --help"


@pytest.mark.parametrize(
    ("table", "arguments", "code", "message"),
    [
        ("evry = 2", [], 2, "{file}: tool.gradtrace has no setting 'evry'; did you mean 'every'?"),
        ("every = 0", ["--every", "2"], 2, "{file}: tool.gradtrace.every: 0 is not a whole number, 1 or more"),
        (
            "",
            ["--watch", "--watch-share", "2"],
            2,
            "invalid value for '--watch-share': 2 is not a number from 0 to 1" + SEE,
        ),
        ("", ["--watch", "--baseline", "gone.parquet"], 3, "no such run: gone.parquet, the baseline"),
        ("mode = 'watch'\nbaseline = 'gone.parquet'", [], 3, "no such run: {directory}/gone.parquet, the baseline"),
        ("", ["--baseline", "gone.parquet"], 2, "--baseline is for watch mode: pass --watch, too" + SEE),
        ("", ["--watch-first", "5"], 2, "--watch-first is for watch mode: pass --watch, too" + SEE),
        (
            "mode = 'watch'",
            ["--full", "--watch-lr-factor", "5"],
            2,
            "--watch-lr-factor is for watch mode: pass --watch, too" + SEE,
        ),
    ],
)
def test_a_mistake_is_one_line(directory, capsys, table, arguments, code, message):
    configure(directory, table)

    found = main(["record", *arguments, "train.py"])

    words = message.format(file=directory / "pyproject.toml", directory=directory)
    assert (found, *capsys.readouterr()) == (code, "", f"gradtrace: error: {words}\n")


def test_a_mistake_in_a_variable_is_one_line(directory, capsys, monkeypatch):
    monkeypatch.setenv("GRADTRACE_WACH_FIRST", "2")

    assert main(["record", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "gradtrace: error: GRADTRACE_WACH_FIRST is no setting of gradtrace; did you mean GRADTRACE_WATCH_FIRST?\n"
    )


def test_several_ranks_do_not_replace_their_baseline(directory, capsys, monkeypatch):
    (directory / "run.parquet").mkdir()
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert main(["record", "--watch", "--baseline", "./run.parquet", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "gradtrace: error: several ranks cannot replace the baseline, ./run.parquet; pass -o to write elsewhere\n"
    )


def test_only_record_reads_settings(directory, capsys, monkeypatch):
    configure(directory, "evry = 2")
    monkeypatch.setenv("GRADTRACE_EVRY", "2")

    assert main(["record", "--help"]) == 0
    assert main(["first-nan", "gone.parquet"]) == 3
    assert capsys.readouterr().err == "gradtrace: error: no such file: gone.parquet\n"


def test_the_help_has_every_setting_with_its_default_in_a_section():
    text = CliRunner().invoke(cli, ["record", "--help"]).output
    sections = re.split(r"^([A-Z][a-z ]+):\n", text, flags=re.MULTILINE)
    options = {
        title: re.findall(r"^ +(--?[a-z][\w-]*)", body, flags=re.MULTILINE)
        for title, body in zip(sections[1::2], sections[2::2], strict=True)
    }

    assert options["Options"][:-1] == ["-m", "-o", "--force", "-q"]  # and that of the help
    watch = [setting.option for key, setting in SETTINGS.items() if key.startswith("watch_")]
    assert options["Watch mode"] == ["--watch", "--full", "--baseline", *watch]
    listed = [option for title in options if title != "Examples" for option in options[title]]
    flat = " ".join(text.split())
    for key, setting in SETTINGS.items():
        if key != "mode":
            assert listed.count(setting.option) == 1
            assert re.search(rf"{setting.option} .*?\[default: {re.escape(setting.shown)}\]", flat)
