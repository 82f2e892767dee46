"""Event files for TensorBoard: what TensorBoard reads back from them, against values derived by hand."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

from gradtrace.analysis import tensorboard
from gradtrace.analysis.recording import Recording
from gradtrace.analysis.tensorboard import Exported, export
from gradtrace.errors import MissingPackageError, NoMatchError, RunExistsError
from gradtrace.trace.runinfo import ModuleInfo
from gradtrace.trace.schema import Record
from tests.traces import write_run

Series = dict[str, list[tuple[int, float]]]


def row(step: int, seq: int, tensor: str, module: str | None, **values: object) -> Record:
    phases = {"grad": "backward", "loss": "loss", "param": "optimizer", "lr": "optimizer", "loss_scale": "optimizer"}
    facts = {"numel": 4, "nan_count": 0, "posinf_count": 0, "neginf_count": 0, "min": -1.0, "max": 1.0, "norm": 2.0}
    facts |= {"phase": phases.get(tensor, "forward"), "time": datetime(2026, 1, 1, 0, 0, step, tzinfo=timezone.utc)}
    return Record(step=step, seq=seq, tensor=tensor, module=module, **(facts | values))  # type: ignore[arg-type]


def scalar(step: int, seq: int, tensor: str, value: float, **values: object) -> Record:
    return row(step, seq, tensor, None, min=value, max=value, norm=abs(value), numel=1, **values)


NOTHING_FINITE = {"min": None, "max": None, "norm": None}


def curves(directory: Path) -> Series:
    """What TensorBoard has of a directory: tag -> steps and values, no point left out."""
    accumulator = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in scalar_tags(accumulator)}


def scalar_tags(accumulator: EventAccumulator) -> list[str]:
    tags: list[str] = accumulator.Tags()["scalars"]
    return tags


def exported(tmp_path: Path, records: list[Record], **options: object) -> Series:
    path = tmp_path / "run.parquet"
    with Recording(path if path.exists() else write_run(path, records)) as run:
        export(run, tmp_path / "events", **options)  # type: ignore[arg-type]
    return curves(tmp_path / "events")


# --- what becomes a scalar ---------------------------------------------------------------------------------


def test_the_run_has_loss_gradient_norm_learning_rates_and_loss_scale(tmp_path: Path) -> None:
    records = []
    for step in range(2):
        first = 10 * step
        records += [
            scalar(step, first, "loss", 2.5 - step, path=""),
            row(step, first + 1, "grad", "layer", path="weight", norm=3.0),
            row(step, first + 2, "grad", "", path="scale", norm=4.0),
            scalar(step, first + 3, "loss_scale", 1024.0, path="0"),
            scalar(step, first + 4, "lr", 0.5, path="0.0"),
            scalar(step, first + 5, "lr", -0.25 - step, path="0.1"),
        ]
    assert exported(tmp_path, records) == {
        "global/loss": [(0, 2.5), (1, 1.5)],
        "global/grad_norm": [(0, 5.0), (1, 5.0)],
        "global/loss_scale": [(0, 1024.0), (1, 1024.0)],
        "global/lr/0.0": [(0, 0.5), (1, 0.5)],
        "global/lr/0.1": [(0, -0.25), (1, -1.25)],
        "global/nonfinite": [(0, 0.0), (1, 0.0)],
        "grad_norm/layer": [(0, 3.0), (1, 3.0)],
        "grad_norm/(root)": [(0, 4.0), (1, 4.0)],
    }


def test_of_several_calls_the_largest_output_counts(tmp_path: Path) -> None:
    records = [
        row(0, 0, "output", "layer", call=0, norm=2.0, min=-8.0, max=1.0),
        row(0, 1, "output", "layer", call=1, norm=7.0, min=-3.0, max=3.5),
        row(0, 2, "output", "layer", micro_step=1, norm=5.0, min=0.0, max=2.0),
        row(0, 3, "input", "layer", norm=100.0, max=100.0),
    ]
    found = exported(tmp_path, records)
    assert (found["output_norm/layer"], found["output_max/layer"]) == ([(0, 7.0)], [(0, 8.0)])


def test_a_gradient_counts_after_the_last_pass_and_a_parameter_after_its_update(tmp_path: Path) -> None:
    records = [
        row(0, 0, "param", "layer", path="weight", norm=50.0, phase="input"),
        row(0, 1, "grad", "layer", path="weight", norm=9.0),
        row(0, 2, "grad", "layer", path="bias", norm=8.0, micro_step=0),
        row(0, 3, "grad", "layer", path="weight", norm=6.0, micro_step=1),
        row(0, 4, "param", "layer", path="weight", norm=5.0),
        row(0, 5, "param", "layer", path="bias", norm=12.0),
    ]
    found = exported(tmp_path, records)
    assert (found["grad_norm/layer"], found["param_norm/layer"]) == ([(0, 10.0)], [(0, 13.0)])
    assert found["global/grad_norm"] == found["grad_norm/layer"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"nan_count": 2}, math.nan),
        ({"posinf_count": 1}, math.inf),
        ({"neginf_count": 3}, math.inf),
        ({"neginf_count": 1, "nan_count": 1}, math.nan),
    ],
)
def test_norms_and_magnitudes_are_not_finite_as_soon_as_one_element_is_not(
    tmp_path: Path, counts: dict[str, int], expected: float
) -> None:
    records = [
        row(0, 0, "output", "layer", **counts),
        row(0, 1, "output", "layer", norm=1e30, max=1e30, call=1),
        row(0, 2, "grad", "layer", path="weight", **counts, **NOTHING_FINITE),
        row(0, 3, "grad", "layer", path="bias"),
    ]
    found = exported(tmp_path, records)
    for tag in ("output_norm/layer", "output_max/layer", "grad_norm/layer", "global/grad_norm"):
        ((step, value),) = found[tag]
        assert (step, str(value)) == (0, str(expected)), tag
    assert found["nonfinite/layer"] == [(0, 2.0 * sum(counts.values()))]


def test_a_loss_that_is_nan_is_a_point_of_its_curve(tmp_path: Path) -> None:
    lost = scalar(1, 1, "loss", 0.0, path="")._replace(nan_count=1, min=None, max=None, norm=None)
    found = exported(tmp_path, [scalar(0, 0, "loss", 1.5, path=""), lost])
    assert str(found["global/loss"]) == "[(0, 1.5), (1, nan)]"
    assert found["global/nonfinite"] == [(0, 0.0), (1, 1.0)]


def test_counts_of_nonfinite_elements_are_there_for_modules_that_had_any_in_every_step(tmp_path: Path) -> None:
    records = [
        row(0, 0, "output", "sick"),
        row(0, 1, "output", "well"),
        row(1, 2, "input", "sick", nan_count=1),
        row(1, 3, "output", "sick", nan_count=1, posinf_count=2, neginf_count=4),
        row(1, 4, "output", "well"),
        row(1, 5, "grad_output", "sick", phase="backward", neginf_count=8),
    ]
    found = exported(tmp_path, records)
    assert found["nonfinite/sick"] == [(0, 0.0), (1, 16.0)]
    assert "nonfinite/well" not in found


def test_evaluation_has_curves_of_its_own(tmp_path: Path) -> None:
    records = [
        row(0, 0, "output", "", norm=2.0),
        row(0, 1, "output", "", norm=99.0, phase="evaluation"),
        row(0, 2, "output", "", norm=98.0, phase="recompute"),
    ]
    found = exported(tmp_path, records)
    assert found["output_norm/(root)"] == [(0, 2.0)]
    assert found["output_norm_evaluation/(root)"] == [(0, 99.0)]


def test_what_was_not_measured_is_no_point(tmp_path: Path) -> None:
    labels = row(0, 0, "output", "labels", norm=None, max=9.0, min=0.0)
    found = exported(tmp_path, [labels, row(1, 1, "output", "empty", **NOTHING_FINITE)])
    assert found == {"output_max/labels": [(0, 9.0)], "global/nonfinite": [(0, 0.0), (1, 0.0)]}


def test_operations_replays_events_and_the_norm_that_watching_notes_are_no_boundaries(tmp_path: Path) -> None:
    records = [
        row(0, 0, "output", "layer", op="aten.exp", nan_count=1, norm=77.0),
        row(0, 1, "output", "layer", phase="replay", nan_count=1, norm=88.0),
        Record(0, 2, "event", "incident", detail="step 0"),
        scalar(0, 3, "grad_norm", 6.5, phase="backward", path=""),
    ]
    assert exported(tmp_path, records) == {"global/grad_norm": [(0, 6.5)]}


def test_a_finite_value_beyond_single_precision_stays_finite(tmp_path: Path) -> None:
    found = exported(tmp_path, [row(0, 0, "output", "layer", norm=1e300, max=2.0, min=-1e300)])
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    assert found["output_norm/layer"] == found["output_max/layer"] == [(0, largest)]


def test_a_point_has_the_time_of_its_step(tmp_path: Path) -> None:
    exported(tmp_path, [scalar(step, step, "loss", 1.0, path="") for step in (3, 4)])
    accumulator = EventAccumulator(str(tmp_path / "events"))
    accumulator.Reload()
    start = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
    assert [event.wall_time for event in accumulator.Scalars("global/loss")] == [start + 3, start + 4]


# --- steps -------------------------------------------------------------------------------------------------


def many_losses() -> list[Record]:
    losses = [scalar(step, 2 * step, "loss", float(step), path="") for step in range(10)]
    return [*losses, Record(7, 15, "event", "incident", detail="step 7")]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"steps": (2, 5)}, [2, 3, 4]),
        ({"steps": (None, 2)}, [0, 1]),
        ({"steps": (8, None)}, [8, 9]),
        ({"every": 4}, [0, 4, 7, 8]),
        ({"every": 4, "steps": (1, 7)}, [4]),
    ],
)
def test_steps_can_be_chosen(tmp_path: Path, options: dict[str, object], steps: list[int]) -> None:
    found = exported(tmp_path, many_losses(), **options)
    assert found["global/loss"] == [(step, float(step)) for step in steps]
    assert [step for step, _ in found["global/nonfinite"]] == steps


def test_steps_that_are_not_there_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoMatchError, match="the recording has no steps of these"):
        exported(tmp_path, many_losses(), steps=(50, 60))
    assert not (tmp_path / "events").exists()


def test_a_recording_without_a_step_yet_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoMatchError, match=r"the recording has no steps$"):
        exported(tmp_path, [])


def test_reading_in_stretches_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exported(tmp_path, many_losses())
    shares: list[float] = []
    monkeypatch.setattr(tensorboard, "_RECORDS_AT_ONCE", 3)
    with Recording(tmp_path / "run.parquet") as run:
        export(run, tmp_path / "again", progress=shares.append)
    assert curves(tmp_path / "again") == whole
    assert shares == [0.0, 0.3, 0.6, 0.8, 1.0]  # step 7 has two records


# --- files -------------------------------------------------------------------------------------------------


def test_each_rank_is_a_run_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    for rank in range(2):
        write_run(path, [scalar(0, 0, "loss", 10.0 + rank, path="", rank=rank)], rank=rank, world_size=2)
    with Recording(path) as run:
        done = export(run, tmp_path / "events")
    for rank in range(2):
        assert curves(tmp_path / "events" / f"rank-{rank}")["global/loss"] == [(0, 10.0 + rank)]
    assert (done.steps, done.curves, done.scalars, len(done.files)) == (1, 4, 4, 2)


def test_an_export_says_what_it_wrote(tmp_path: Path) -> None:
    with Recording(write_run(tmp_path / "run.parquet", many_losses())) as run:
        done = export(run, tmp_path / "events")
    (file,) = (tmp_path / "events").iterdir()
    assert done == Exported([str(file)], steps=10, curves=2, scalars=20)
    assert "tfevents" in file.name
    assert len(list(RawEventFileLoader(str(file)).Load())) == 11  # the version, then an event a step


def test_an_earlier_export_is_replaced_only_when_asked_and_other_files_stay(tmp_path: Path) -> None:
    directory = tmp_path / "events"
    exported(tmp_path, many_losses())
    own = directory / "events.out.tfevents.1.host.training"
    own.write_bytes(b"")
    (earlier,) = directory.glob("*.gradtrace")
    earlier.rename(directory / "events.out.tfevents.1.gradtrace")

    with pytest.raises(RunExistsError, match="has an earlier export; pass --force"):
        exported(tmp_path, many_losses())
    assert exported(tmp_path, many_losses(), steps=(2, 4), force=True)["global/loss"] == [(2, 2.0), (3, 3.0)]
    assert own.exists() and len(list(directory.iterdir())) == 2


def test_an_export_that_fails_leaves_the_earlier_one_alone(tmp_path: Path) -> None:
    exported(tmp_path, many_losses())
    before = [(path.name, path.read_bytes()) for path in (tmp_path / "events").iterdir()]

    def full(share: float) -> None:
        if share == 1.0:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        exported(tmp_path, many_losses(), force=True, progress=full)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "events").iterdir()] == before


# --- the package -------------------------------------------------------------------------------------------


def test_without_the_package_the_message_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'gradtrace\[tensorboard\]'"):
        tensorboard.require_package()


def test_neither_torch_nor_tensorflow_is_imported_even_where_they_are_installed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.parquet", many_losses(), modules=[ModuleInfo("", "Net", root=True)])
    for name in ("tensorflow", "torch"):
        (tmp_path / "lib" / name).mkdir(parents=True)
        (tmp_path / "lib" / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "lib")!r})
from gradtrace.analysis.recording import Recording
from gradtrace.analysis.tensorboard import export
with Recording({str(run)!r}) as run:
    print(export(run, {str(tmp_path / "events")!r}).scalars)
print(sorted({{"torch", "tensorflow", "tensorboard"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("20\n['tensorboard']\n", 0), done.stderr
