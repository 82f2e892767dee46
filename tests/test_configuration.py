"""The page on configuration against the code that it describes."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import get_args

import click
import pytest
from gradtrace_cli.main import cli
from gradtrace_cli.record import record

from gradtrace.capture.watch.triggers import WatchSchedule
from gradtrace.settings import SETTINGS, Settings, Switch, load

PAGE = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table that has this header, without backticks."""
    body = PAGE.partition(f"{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_table_has_exactly_the_settings_in_their_order_with_all_that_is_said_of_them() -> None:
    table = rows("| key | option | variable | default | meaning |")
    assert [[key, variable, default, meaning] for key, _, variable, default, meaning in table] == [
        [f"`{setting.key}`", f"`{setting.variable}`", setting.shown, setting.meaning] for setting in SETTINGS.values()
    ]


def test_the_options_of_the_table_are_those_of_record() -> None:
    of_record: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for param in record.params:
        of_record[param.name or ""] += [(text, param.metavar or "") for text in (*param.opts, *param.secondary_opts)]
    for key, cell, *_ in rows("| key | option | variable | default | meaning |"):
        named = [tuple((text + " ").split(" ")[:2]) for text in re.findall(r"`([^`]+)`", cell)]
        assert named == of_record[key.strip("`")]


def test_the_three_ways_to_write_the_example_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    meant = Settings(mode="watch", first_step=1, include=("layers.*", "head"))
    on_the_command_line, with_variables = block("sh").splitlines()

    group = click.Context(cli, **cli.context_settings)
    with record.make_context("record", shlex.split(on_the_command_line)[2:], parent=group) as context:
        given = {key: value for key, value in context.params.items() if key in SETTINGS and value not in (None, ())}
    assert load(given, environ={}) == meant

    variables = dict(word.split("=", 1) for word in shlex.split(with_variables) if "=" in word)
    assert load({}, environ=variables) == meant

    (tmp_path / "pyproject.toml").write_text(block("toml"))
    assert load({}, environ={}) == meant
    assert 'gradtrace.trace(model, mode="watch", first_step=1, include=["layers.*", "head"])' in block("python")


def test_what_may_be_written_for_the_switch_of_blocks_is_what_is_understood() -> None:
    words = [word for word, _ in rows("| `GRADTRACE` | what a block does |")]
    assert words[0] == "not set"
    assert {word.strip("`") for word in words[1:]} == {*get_args(Switch)}


def test_the_numbers_of_watch_mode_are_the_defaults() -> None:
    text = "\n".join(" ".join(row) for row in rows("| captured in full | settings |"))
    default = {key: setting.shown for key, setting in SETTINGS.items()}
    assert f"first {default['watch_first']} steps" in text
    assert f"first {default['watch_changed_first']}," in text
    assert text.count(f"{default['watch_after']} steps after") == 3
    assert f"more than {default['watch_lr_factor']} times" in text
    assert f"exceeded {default['watch_spike_factor']} times" in text
    assert f"last {default['watch_spike_window']} steps" in text
    assert f"at most {float(default['watch_share']):.0%}".replace("%", " %") in PAGE
    named = set(re.findall(r"`(watch_\w+)`", text)) | {"watch_share"}
    assert named == {key for key in SETTINGS if key.startswith("watch_")}


def test_the_words_of_the_switches_are_what_the_schedule_says() -> None:
    schedule = WatchSchedule()
    said = []
    for step in range(1200):
        said.append(schedule.switch(step))
        rates = {"0.0": 0.001 if step < 1183 else 0.01}
        schedule.observe(step, loss=1.0, gradient_norm=1.0, rates=rates, incident=False)
    assert block("text").splitlines() == [words for words in said if words is not None]
