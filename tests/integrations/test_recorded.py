"""Scripts of real libraries, unmodified, recorded: they print what they print natively, and all is seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gradtrace
from tests.integrations.running import SCRIPTS, called_modules, record, run, verdict_on


@dataclass(frozen=True)
class Case:
    """A script with what a recording of it has to hold.

    ``boundaries`` are inner modules, ``root_outputs`` paths, ``evaluations`` the calls without grad mode, and
    ``tied`` parameters that have another module's name already. ``unregistered`` counts calls of modules that the
    model makes in its forward: BERT its criterion, in training and evaluation alike.
    """

    script: str
    steps: int
    micro_steps: int
    boundaries: tuple[str, ...]
    root_outputs: tuple[str, ...]
    evaluations: int = 0
    tied: tuple[tuple[str, str], ...] = ()
    unregistered: int = 0


_GPT2 = ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc")
_BERT = ("bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.1.output.dense")
_RESNET = ("layer1.0.conv2", "layer2.0.downsample.0", "layer4.1.bn2")
_NAMED = ("loss", "logits")
_TIED = (("lm_head", "weight"),)

CASES = (
    Case("resnet18.py", 4, 1, _RESNET, ("0",)),
    Case("gpt2.py", 4, 1, _GPT2, _NAMED, tied=_TIED),
    Case("bert.py", 4, 1, _BERT, _NAMED, evaluations=2, unregistered=4 + 2),
    Case("hf_trainer.py", 3, 2, _GPT2, _NAMED, tied=_TIED),
    Case("lightning_trainer.py", 6, 1, ("net.2",), ("0",), evaluations=2),
)


@dataclass(frozen=True)
class Recording:
    """One script, run natively and recorded."""

    case: Case
    native: str
    printed: str
    said: str
    path: Path

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what a query answers."""
        with gradtrace.open_run(self.path) as opened:
            return opened.sql(query).rows


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.script)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The script of the case, run twice."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp("recorded")
    native = run(str(SCRIPTS / case.script), cwd=folder)
    done = record(folder, case.script)
    return Recording(case, native.stdout, done.stdout, done.stderr, folder / "run.parquet")


def test_the_script_prints_the_same_numbers(recording: Recording) -> None:
    assert recording.native.strip()
    assert recording.printed == recording.native


def test_every_step_and_pass_is_counted(recording: Recording) -> None:
    rows = recording.rows("SELECT step, micro_steps FROM steps WHERE lr IS NOT NULL ORDER BY step")
    assert rows == [(step, recording.case.micro_steps) for step in range(recording.case.steps)]


@pytest.mark.filterwarnings("ignore")  # the script runs in this process, where the libraries' warnings are theirs
def test_every_module_that_is_called_is_observed(recording: Recording) -> None:
    called = called_modules(recording.case.script)
    assert {name for (name,) in recording.rows("SELECT module FROM modules WHERE calls > 0")} == called
    assert {name for (name,) in recording.rows("SELECT module FROM records WHERE tensor = 'output'")} == called


def test_nothing_went_unmeasured(recording: Recording) -> None:
    assert "warning" not in recording.said.lower().replace("userwarning", "")
    ((unmeasured,),) = recording.rows("SELECT value FROM meta WHERE key = 'unmeasured'")
    unregistered = {"call of a module that is registered nowhere in its model": recording.case.unregistered}
    assert json.loads(unmeasured) == (unregistered if recording.case.unregistered else {})


def test_inner_modules_have_all_four_boundaries_in_every_pass(recording: Recording) -> None:
    passes = recording.case.steps * recording.case.micro_steps
    for module in recording.case.boundaries:
        rows = recording.rows(
            f"""SELECT tensor, count(DISTINCT (step, micro_step)) FROM records
                WHERE module = '{module}' AND phase IN ('forward', 'backward') AND tensor <> 'grad'
                GROUP BY tensor"""
        )
        assert dict(rows) == dict.fromkeys(("input", "output", "grad_output", "grad_input"), passes), module


def test_the_roots_outputs_are_recorded_by_name(recording: Recording) -> None:
    paths = recording.rows(
        "SELECT DISTINCT path FROM records WHERE module = '' AND tensor = 'output' AND phase = 'forward'"
    )
    assert {path for (path,) in paths} >= set(recording.case.root_outputs)


def test_every_parameter_is_recorded_after_every_step_and_every_gradient_before(recording: Recording) -> None:
    """The parameters are those of the module table; one that two modules share goes by its first name."""
    parameters = {
        (module, path)
        for module, shapes in recording.rows("SELECT module, shapes FROM modules")
        for path in dict(shapes)
    } - set(recording.case.tied)
    assert parameters
    for table in ("params", "grads"):
        rows = recording.rows(f"SELECT step, module, path FROM {table} WHERE phase <> 'input'")
        for step in range(recording.case.steps):
            assert {(module, path) for at, module, path in rows if at == step} == parameters, (table, step)


def test_the_recorded_losses_are_the_printed_ones(recording: Recording) -> None:
    lines = [line.split() for line in recording.printed.splitlines()]
    printed = [float(words[1]) for words in lines if words[0] == "train" or words[0].isdigit()]
    losses = [
        loss
        for (loss,) in recording.rows("SELECT sum(max) FROM records WHERE tensor = 'loss' GROUP BY step ORDER BY step")
    ]
    assert losses == pytest.approx(printed, rel=1e-6)


def test_evaluation_is_a_phase_of_its_own(recording: Recording) -> None:
    rows = recording.rows(
        """SELECT count(*) FROM records
           WHERE phase = 'evaluation' AND module = '' AND tensor = 'output' AND path IN ('0', 'logits')"""
    )
    assert rows == [(recording.case.evaluations,)]


def test_a_healthy_run_is_found_healthy(recording: Recording) -> None:
    verdict = verdict_on(recording.path.parent)
    assert verdict["found"] is False
    assert verdict["incidents"] == []
