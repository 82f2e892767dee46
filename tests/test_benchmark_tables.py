"""What the cost benchmarks print, and the models and runs that they make for it."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_training import small_training

from benchmarks import disk, growth, memory, models, overhead, tables
from benchmarks.pairs import Block, Costs, Pair


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    """Every block collects garbage first, which takes long among all that a test run has loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


def _pairs(*ratios: float) -> list[Pair]:
    return [(Block(1, 1, 1, 1), Block(of, of, of, of)) for of in ratios]


def test_a_target_is_reached_when_the_upper_end_is_under_it() -> None:
    full = _pairs(*[1.1] * 5, 1.16)
    rows = tables.targets([Costs("cnn", {"full": full, "detect_anomaly": _pairs(*[1.4] * 6)}, {})]).splitlines()
    assert rows[2] == "| cnn | full | 1.100 (1.100 to 1.160) | 1.150 | no | - | 0.25 |"
    rows = tables.targets([Costs("cnn", {"full": _pairs(*[1.1] * 6)}, {})]).splitlines()
    assert rows[2] == "| cnn | full | 1.100 (1.100 to 1.100) | 1.150 | yes | - | - |"


def test_where_reading_alone_costs_more_the_target_follows_the_floor() -> None:
    costs = Costs("resnet50", {"full": _pairs(*[1.12] * 6), "floor": _pairs(*[1.1] * 6)}, {})
    assert (
        tables.targets([costs])
        .splitlines()[2]
        .startswith("| resnet50 | full | 1.120 (1.120 to 1.120) | 1.130 | yes | 1.20 |")
    )


def test_the_command_prints_the_tables_and_writes_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    monkeypatch.setitem(models.MODELS, "cnn", small_training)
    threads = str(torch.get_num_threads())
    line = f"overhead --models cnn --variants full --pairs 6 --seconds 0.001 --threads {threads} --json {file}"
    monkeypatch.setattr(sys, "argv", line.split())
    assert overhead.main() == 0
    out = capsys.readouterr().out
    assert "| model | step, off | off again | full |" in out
    assert "| added to | detect_anomaly, as quoted |" in out
    (costs,) = json.loads(file.read_text())
    assert {name: len(pairs) for name, pairs in costs["pairs"].items()} == {"off": 6, "full": 6}


def test_too_few_pairs_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["overhead", "--pairs", "5"])
    with pytest.raises(SystemExit):
        overhead.main()
    assert "--pairs 5: there is no 95 % interval of fewer than 6" in capsys.readouterr().err


@pytest.mark.parametrize(("modules", "depth"), [(10, 5), (500, 5), (500, 100)])
def test_a_nested_model_has_exactly_its_modules_at_its_depth(modules: int, depth: int) -> None:
    model = growth.nested(modules, depth)
    assert len([*model.modules()]) == modules
    deepest = max((name for name, _ in model.named_modules()), key=lambda name: name.count("."))
    assert deepest.count(".") + 1 == depth  # the leaves of the innermost container
    assert sum(isinstance(module, growth.Container) for module in model.modules()) == depth


def test_a_recorded_run_has_its_bytes_and_its_time_in_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "cnn", small_training)
    write = disk.RunWriter.write
    it = disk.record("cnn", "full", 10)
    assert disk.RunWriter.write is write
    assert it.steps == 12 and it.records > 12 * 15
    assert 0 < it.writing < it.step
    assert it.size > it.records


def test_peaks_are_of_processes_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def peak(model: str, variant: str, steps: int, threads: int) -> float | str:
        asked.append(variant)
        return {"off": 100.0, "full": 100.0 + 10 * len(asked), "naive": "RuntimeError: no"}[variant]

    monkeypatch.setattr(memory, "peak_of_a_run", peak)
    rows = memory.compare("cnn", ["off", "full", "naive"], steps=1, threads=1, repeat=3)
    assert asked == ["off", "full", "naive", "off", "full", "off", "full"]
    # The second, the fifth and the seventh that were asked.
    assert rows == [
        ["cnn", "off", "100", "100 to 100", "0", "1.000"],
        ["cnn", "full", "150", "120 to 170", "50", "1.500"],
    ]
