"""The model of an earlier run, compared with the one that is being trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from gradtrace.capture.tracer import Tracer
from gradtrace.capture.watch.baseline import Baseline
from gradtrace.errors import GradtraceError, NoMatchError, NotARunError, RunNotFoundError
from gradtrace.trace.parts import parts_of
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.writer import RunWriter

MODEL = [
    ModuleInfo("", "Net", root=True, parameters={"scale": "[1]"}),
    ModuleInfo("fc", "Linear", depth=1, parameters={"weight": "[10, 32]", "bias": "[10]"}),
    ModuleInfo("act", "ReLU", depth=1),
    ModuleInfo("criterion", "MSELoss", root=True),
]


def changed(name: str, **facts: object) -> list[ModuleInfo]:
    return [replace(module, **facts) if module.name == name else module for module in MODEL]  # type: ignore[arg-type]


def fc(**parameters: str) -> list[ModuleInfo]:
    return changed("fc", parameters={"weight": "[10, 32]", "bias": "[10]"} | parameters)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (fc(weight="[10, 64]"), "fc.weight is [10, 64], was [10, 32]"),
        (fc(weight="[1]", bias="[1]"), "fc.weight is [1], was [10, 32], and 1 more"),
        (fc(gain="[10]"), "fc.gain [10] is new"),
        (changed("fc", parameters={"weight": "[10, 32]"}), "fc.bias [10] is gone"),
        (changed("", parameters={"scale": "[2]"}), "scale is [2], was [1]"),
        (changed("act", type="GELU"), "act is GELU, was ReLU"),
        (changed("", type="Net2"), "(root) is Net2, was Net"),
        (MODEL[:2] + MODEL[3:], "act (ReLU) is gone"),
        ([*MODEL[:3], ModuleInfo("head", "Linear", depth=1), MODEL[3]], "head (Linear) is new"),
        ([*MODEL, ModuleInfo("critic", "Critic", root=True)], "critic (Critic) is new"),
        (MODEL[:1], "fc (Linear) is gone, and 1 more"),
    ],
)
def test_what_differs_is_named(modules: list[ModuleInfo], words: str) -> None:
    assert Baseline(MODEL).difference(modules) == words


@pytest.mark.parametrize(
    "modules",
    [
        MODEL,
        MODEL[:3],
        [],
        [replace(module, calls=7, file="net.py", line=3) for module in MODEL],
        [*MODEL, MODEL[3]],
    ],
    ids=["all", "the criterion has not been called", "nothing has been called", "other facts", "a criterion made anew"],
)
def test_the_same_modules_as_far_as_they_were_called_are_no_difference(modules: list[ModuleInfo]) -> None:
    assert Baseline(MODEL).difference(modules) is None


def test_a_lazy_module_that_was_not_called_yet_has_lost_nothing() -> None:
    before = [ModuleInfo("", "LazyLinear", root=True, parameters={"weight": "[2, 3]"})]
    assert Baseline(before).difference([ModuleInfo("", "LazyLinear", root=True)]) is None
    other = [ModuleInfo("", "LazyLinear", root=True, parameters={"weight": "[2, 4]"})]
    assert Baseline(before).difference(other) == "weight is [2, 4], was [2, 3]"


# --- where it is read from --------------------------------------------------------------------------------


def info(rank: int = 0, world_size: int = 1, modules: list[ModuleInfo] = MODEL) -> RunInfo:
    return RunInfo(run_id="a", rank=rank, world_size=world_size, modules=modules)


def finished(path: Path) -> Path:
    RunWriter(path, info()).finish(info())
    return path


def unfinished(path: Path) -> Path:
    RunWriter(path, info()).close_parts(info())
    return path


def parts(path: Path) -> Path:
    return parts_of(unfinished(path))


def of_ranks(path: Path) -> Path:
    for rank in (1, 0):
        writer = RunWriter(path, info(rank, 2))
        writer.finish(info(rank, 2))
    return path


def of_unfinished_ranks(path: Path) -> Path:
    for rank in (1, 0):
        RunWriter(path, info(rank, 2)).close_parts(info(rank, 2))
    return path


@pytest.mark.parametrize("write", [finished, unfinished, parts, of_ranks, of_unfinished_ranks])
def test_a_run_is_read_in_whatever_state_it_is(write: Callable[[Path], Path], tmp_path: Path) -> None:
    baseline = Baseline.of(write(tmp_path / "run.parquet"))
    assert baseline.difference(MODEL) is None
    assert baseline.difference(changed("act", type="GELU")) == "act is GELU, was ReLU"


def test_each_rank_is_compared_with_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    for rank, modules in ((0, MODEL), (1, changed("act", type="GELU"))):
        RunWriter(path, info(rank, 2)).finish(info(rank, 2, modules))
    assert Baseline.of(path, rank=0).difference(MODEL) is None
    assert Baseline.of(path, rank=1).difference(MODEL) == "act is ReLU, was GELU"
    assert Baseline.of(path, rank=7).difference(MODEL) is None


def test_a_recorded_model_is_the_same_as_itself_and_not_as_a_wider_one(tmp_path: Path) -> None:
    def recorded(width: int) -> Path:
        path = tmp_path / f"{width}.parquet"
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        with Tracer(None, path):
            nn.MSELoss()(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
        return path

    narrow, wide = recorded(8), recorded(16)
    baseline = Baseline.of(narrow)
    modules = [RunInfo.from_json(pq.read_schema(path).metadata[b"gradtrace"], "").modules for path in (narrow, wide)]
    assert baseline.difference(modules[0]) is None
    assert baseline.difference(modules[1]) == "0.weight is [16, 4], was [8, 4], and 2 more"


# --- what is no run ---------------------------------------------------------------------------------------


def nothing(path: Path) -> None:
    pass


def text(path: Path) -> None:
    path.write_text("no run")


def empty_directory(path: Path) -> None:
    path.mkdir()


def foreign_parquet(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def no_modules(path: Path) -> None:
    RunWriter(path, info(modules=[])).finish(info(modules=[]))


def parts_without_facts(path: Path) -> None:
    parts_of(path).mkdir()


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (nothing, RunNotFoundError, "no such run: {path}"),
        (text, NotARunError, "{path} is not a Parquet file"),
        (empty_directory, NotARunError, "{path} is a directory without a run in it"),
        (foreign_parquet, NotARunError, "{path} is a Parquet file, but not a gradtrace run"),
        (parts_without_facts, NotARunError, "{path} is no whole run: {path}.parts/run.json is missing"),
        (
            no_modules,
            NoMatchError,
            "{path} has no modules to compare the model with: nothing was called in that run",
        ),
    ],
)
def test_what_is_no_run_is_one_sentence(
    write: Callable[[Path], None], error: type[GradtraceError], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "old.parquet"
    write(path)
    with pytest.raises(error) as raised:
        Baseline.of(path)
    assert str(raised.value) == message.format(path=path)
