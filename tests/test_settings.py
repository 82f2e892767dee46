"""Settings: from pyproject.toml, from variables, given on the spot; what is wrong with them and where."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gradtrace.capture.block import trace, tracer_arguments
from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.triggers import Triggers
from gradtrace.errors import CaptureError
from gradtrace.settings import SETTINGS, Settings, load, trace_switch


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which the tests run in, and no variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GRADTRACE")]:
        monkeypatch.delenv(name)
    return tmp_path


def write(directory: Path, table: str) -> Path:
    file = directory / "pyproject.toml"
    file.write_text(f"[tool.gradtrace]\n{table}\n", encoding="utf-8")
    return file


def refusal(**environ: str) -> str:
    with pytest.raises(CaptureError) as refused:
        load({}, environ=environ)
    message = str(refused.value)
    assert "\n" not in message
    return message


# --- one table --------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_tracer_and_its_triggers() -> None:
    arguments = tracer_arguments(Settings())
    signature = inspect.signature(Tracer.__init__).parameters
    assert arguments.pop("triggers") == Triggers()
    for key, value in arguments.items():
        assert value == signature[key].default, key


def test_a_block_takes_every_setting_by_its_key_and_shows_its_default() -> None:
    parameters = dict(inspect.signature(trace).parameters)
    for name in ("models", "path", "overwrite"):
        del parameters[name]
    assert {name: repr(parameter.default) for name, parameter in parameters.items()} == {
        key: repr(setting.default) for key, setting in SETTINGS.items()
    }


def test_the_default_that_is_shown_reads_as_the_default() -> None:
    for setting in SETTINGS.values():
        if setting.shown not in ("all", "none"):
            assert setting.kind.read(setting.shown) == setting.default, setting.key


def test_without_any_configuration_everything_is_by_default() -> None:
    assert load({}, environ={}) == Settings()


# --- where values come from -------------------------------------------------------------------------------

WRITTEN: dict[str, tuple[str, str, Any]] = {
    "mode": ('"watch"', "watch", "watch"),
    "every": ("10", "10", 10),
    "steps": ('"100:200"', "100:200", (100, 200)),
    "first_step": ("7", "7", 7),
    "include": ('["layers.*", "head"]', "layers.*, head", ("layers.*", "head")),
    "exclude": ('["a"]', "a", ("a",)),
    "engine": ('"hooks"', "hooks", "hooks"),
    "op_steps": ('"3:"', "3:", (3, None)),
    "keep_compiled": ("true", "true", True),
    "loss_lines": ("false", "false", False),
    "on_nonfinite": ('"stop"', "stop", "stop"),
    "replays": ("0", "0", 0),
    "capsule_limit": ("0", "0", 0),
    "max_size": ('"1.5GB"', "1.5GB", 1_500_000_000),
    "watch_first": ("1", "1", 1),
    "watch_after": ("0", "0", 0),
    "watch_lr_factor": ("3", "3", 3.0),
    "watch_spike_factor": ("4.5", "4.5", 4.5),
    "watch_spike_window": ("10", "10", 10),
    "watch_share": ("0", "0", 0.0),
    "watch_changed_first": ("2", "2", 2),
}


def test_every_key_can_be_written_in_the_file(project: Path) -> None:
    write(project, "\n".join(f"{key} = {toml}" for key, (toml, _, _) in WRITTEN.items()))
    expected = {key: value for key, (_, _, value) in WRITTEN.items()}
    assert asdict(load({}, environ={})) == expected | {"baseline": None}
    assert {*expected, "baseline"} == {*SETTINGS}


@pytest.mark.parametrize("key", WRITTEN)
def test_every_key_has_a_variable(key: str) -> None:
    _, text, value = WRITTEN[key]
    assert load({}, environ={f"GRADTRACE_{key.upper()}": text}) == Settings(**{key: value})


@pytest.mark.parametrize(
    ("toml", "key", "value"),
    [
        ('include = "layers.*"', "include", ("layers.*",)),
        ('include = ["a,b"]', "include", ("a,b",)),
        ("capsule_limit = 5_000", "capsule_limit", 5000),
        ('capsule_limit = "2 GiB"', "capsule_limit", 2**31),
        ('every = "3"', "every", 3),
        ('loss_lines = "no"', "loss_lines", False),
        ('steps = ":5"', "steps", (None, 5)),
    ],
)
def test_a_value_may_be_written_in_other_ways(toml: str, key: str, value: Any, project: Path) -> None:
    write(project, toml)
    assert load({}, environ={}) == Settings(**{key: value})


def test_what_is_given_is_above_a_variable_above_the_file_above_the_default(project: Path) -> None:
    write(project, "every = 2\nreplays = 2\nfirst_step = 2\ninclude = ['file']")
    environ = {"GRADTRACE_EVERY": "3", "GRADTRACE_REPLAYS": "3"}
    found = load({"every": 4, "include": ()}, environ=environ)
    assert found == Settings(every=4, replays=3, first_step=2, include=())


def test_a_variable_that_is_set_to_nothing_is_not_set(project: Path) -> None:
    write(project, "every = 2")
    assert load({}, environ={"GRADTRACE_EVERY": "", "GRADTRACE_WHATEVER": ""}).every == 2


def test_the_variables_are_those_of_the_process_if_no_others_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADTRACE_EVERY", "3")
    monkeypatch.setenv("GRADTRACE", "off")
    assert load({}) == Settings(every=3)
    assert trace_switch() == "off"


def test_the_nearest_file_with_the_table_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = project / "packages" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    write(project, "every = 5")
    assert load({}, environ={}).every == 5
    (project / "packages" / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["gradtrace"]\n')
    assert load({}, environ={}).every == 5
    write(inner, "replays = 1")
    assert load({}, environ={}) == Settings(replays=1)


def test_a_baseline_in_the_file_is_found_from_the_file_and_any_other_from_where_one_is(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, 'baseline = "runs/old.parquet"')
    (project / "inner").mkdir()
    monkeypatch.chdir(project / "inner")
    assert load({}, environ={}).baseline == str(project / "runs" / "old.parquet")
    assert load({}, environ={"GRADTRACE_BASELINE": "runs/old.parquet"}).baseline == "runs/old.parquet"
    write(project, f'baseline = "{project}/x.parquet"')
    assert load({}, environ={}).baseline == f"{project}/x.parquet"


def test_a_directory_that_is_gone_has_no_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load({}, environ={}) == Settings()


# --- what is wrong with them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("evry = 2", "tool.gradtrace has no setting 'evry'; did you mean 'every'?"),
        ("first-step = 2", "tool.gradtrace has no setting 'first-step'; did you mean 'first_step'?"),
        ("Every = 2", "tool.gradtrace has no setting 'Every'; did you mean 'every'?"),
        ("[tool.gradtrace.watch]\nfirst = 1", "tool.gradtrace has no setting 'watch'; did you mean 'watch_share'?"),
        ("every = 0", "tool.gradtrace.every: 0 is not a whole number, 1 or more"),
        ("every = 1.5", "tool.gradtrace.every: 1.5 is not a whole number, 1 or more"),
        ("every = true", "tool.gradtrace.every: true is not a whole number, 1 or more"),
        ('every = "x"', "tool.gradtrace.every: 'x' is not a whole number, 1 or more"),
        ('mode = "ful"', "tool.gradtrace.mode: 'ful' is not one of 'full', 'watch'"),
        ("mode = false", "tool.gradtrace.mode: false is not one of 'full', 'watch'"),
        ("steps = 7", "tool.gradtrace.steps: 7 is not a range of steps, as in '100:200'"),
        ('steps = "7"', "tool.gradtrace.steps: '7' is not A:B, as in 100:200, 100: or :200"),
        ('steps = "7:7"', "tool.gradtrace.steps: no step lies in 7:7; A:B is A up to, not including, B"),
        ("include = [1]", "tool.gradtrace.include: [1] is not a list of strings"),
        ("loss_lines = 1", "tool.gradtrace.loss_lines: 1 is not true or false"),
        ('loss_lines = "maybe"', "tool.gradtrace.loss_lines: 'maybe' is not true or false"),
        ('max_size = "2XB"', "tool.gradtrace.max_size: '2XB' is no size, as in 500MB or 1GiB"),
        ("max_size = -1", "tool.gradtrace.max_size: '-1' is no size, as in 500MB or 1GiB"),
        ("max_size = 1.5", "tool.gradtrace.max_size: 1.5 is not a size, as in '500MB'"),
        ("watch_share = 2", "tool.gradtrace.watch_share: 2 is not a number from 0 to 1"),
        ("watch_share = nan", "tool.gradtrace.watch_share: nan is not a number from 0 to 1"),
        ("watch_lr_factor = 1", "tool.gradtrace.watch_lr_factor: 1 is not a number above 1"),
        ("watch_lr_factor = inf", "tool.gradtrace.watch_lr_factor: inf is not a number above 1"),
        ('watch_lr_factor = "x"', "tool.gradtrace.watch_lr_factor: 'x' is not a number above 1"),
        ("baseline = 1", "tool.gradtrace.baseline: 1 is not a path"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_that_names_file_and_key(toml: str, message: str, project: Path) -> None:
    file = write(project, toml)
    assert refusal() == f"{file}: {message}"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GRADTRACE_EVRY", "2", "GRADTRACE_EVRY is no setting of gradtrace; did you mean GRADTRACE_EVERY?"),
        ("GRADTRACE_every", "2", "GRADTRACE_every is no setting of gradtrace; did you mean GRADTRACE_EVERY?"),
        ("GRADTRACE_EVERY", "0", "GRADTRACE_EVERY: 0 is not a whole number, 1 or more"),
        ("GRADTRACE_MODE", "off", "GRADTRACE_MODE: 'off' is not one of 'full', 'watch'"),
        ("GRADTRACE_STEPS", "7:7", "GRADTRACE_STEPS: no step lies in 7:7; A:B is A up to, not including, B"),
    ],
)
def test_a_mistake_in_a_variable_is_one_sentence_that_names_it(name: str, value: str, message: str) -> None:
    assert refusal(**{name: value}) == message


def test_a_mistake_is_told_even_where_a_better_value_is_above_it(project: Path) -> None:
    file = write(project, "every = 0")
    with pytest.raises(CaptureError) as refused:
        load({"every": 2}, environ={"GRADTRACE_EVERY": "3"})
    assert str(refused.value).startswith(f"{file}: ")


def test_a_table_that_is_none_is_told(project: Path) -> None:
    file = project / "pyproject.toml"
    file.write_text("[tool]\ngradtrace = 5\n")
    assert refusal() == f"{file}: tool.gradtrace is 5; it is a table of settings"


def test_a_file_that_cannot_be_parsed_is_told_with_the_line(project: Path) -> None:
    file = write(project, "every = 1\nreplays")
    message = refusal()
    assert message.startswith(f"{file} is not TOML: ")
    assert "line 3" in message


def test_a_file_that_is_not_text_is_told(project: Path) -> None:
    file = project / "pyproject.toml"
    file.write_bytes(b"[tool.gradtrace]\nmode = '\xff'\n")
    assert refusal().startswith(f"{file} is not TOML: 'utf-8' codec can't decode byte 0xff")


def test_a_broken_file_that_does_not_mention_gradtrace_is_left_to_others(project: Path) -> None:
    (project / "pyproject.toml").write_text("[project\nname = ")
    assert load({}, environ={}) == Settings()


def test_numbers_and_nesting_beyond_all_bounds_are_told(project: Path) -> None:
    file = project / "pyproject.toml"
    file.write_text("[tool.gradtrace]\nevery = " + "[" * 100_000)
    with pytest.raises(CaptureError) as error:
        load({}, environ={})
    assert str(error.value) == f"{file} is not TOML that can be read: it is nested too deeply"
    digits = "9" * 400
    with pytest.raises(CaptureError) as error:
        load({}, environ={"GRADTRACE_MAX_SIZE": f"{digits}GB"})
    assert str(error.value) == f"GRADTRACE_MAX_SIZE: '{digits}GB' is too large a size"


def test_a_file_that_cannot_be_read_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(project, "every = 2")

    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert refusal() == f"{file} cannot be read for settings: Permission denied"


@pytest.mark.parametrize("word", ["off", "watch", "full"])
def test_the_switch_of_blocks_is_one_of_three_words(word: str) -> None:
    assert trace_switch({"GRADTRACE": word}) == word
    assert trace_switch({"GRADTRACE": ""}) is None
    assert trace_switch({}) is None


def test_another_word_is_refused() -> None:
    with pytest.raises(CaptureError) as refused:
        trace_switch({"GRADTRACE": "on"})
    assert str(refused.value) == "GRADTRACE: 'on' is not one of 'off', 'watch', 'full'"


def test_reading_settings_loads_nothing_heavy(project: Path) -> None:
    write(project, "every = 2")
    code = "import sys, gradtrace.settings as s; print(s.load({}).every, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True)
    every, *modules = done.stdout.split()
    assert every == "2"
    assert not {"torch", "pyarrow", "duckdb", "click", "rich"} & set(modules)
