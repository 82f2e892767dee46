"""What stays of a step that is thinned, and the norm of its gradients, against values worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from gradtrace.trace.arrow import ARROW_SCHEMA, batch_of_records
from gradtrace.trace.protection import Protection
from gradtrace.trace.schema import COLUMN_NAMES, Record
from gradtrace.trace.thinning import Plan, contents, thinned

EVERY_OTHER = Plan(full=2)
TIME = datetime(2026, 1, 1, tzinfo=timezone.utc)
FINITE: dict[str, Any] = {"numel": 4, "nan_count": 0, "posinf_count": 0, "neginf_count": 0}
NAN: dict[str, Any] = {"numel": 4, "nan_count": 1, "posinf_count": 0, "neginf_count": 0}


def row(step: int, phase: str, tensor: str, module: str | None = None, **values: Any) -> Record:
    return Record(step, 0, phase, tensor, module, rank=3, time=TIME, **{**FINITE, **values})


def table(rows: Iterable[Record]) -> pa.Table:
    """Return the rows as a table, numbered by tens, in batches of two rows with dictionaries of their own."""
    numbered = [one._replace(seq=10 * number) for number, one in enumerate(rows)]
    batches = [batch_of_records(numbered[start : start + 2]) for start in range(0, len(numbered), 2)]
    return pa.Table.from_batches(batches, ARROW_SCHEMA)


def records(found: pa.Table) -> list[Record]:
    return [Record(**{name: values[name] for name in COLUMN_NAMES}) for values in found.to_pylist()]


def told(found: pa.Table) -> list[tuple[int, str, str | None]]:
    return [(one.seq, one.tensor, one.module) for one in records(found)]


FULL_STEP = [
    row(1, "input", "param", "fc", path="weight"),
    row(1, "input", "input", ""),
    row(1, "forward", "output", "fc"),
    row(1, "forward", "output", "mask", neginf_count=2),
    row(1, "forward", "output", ""),
    row(1, "evaluation", "output", "criterion"),
    row(1, "loss", "loss"),
    row(1, "backward", "grad_output", "fc"),
    row(1, "backward", "grad", "fc", path="weight", norm=3.0),
    row(1, "backward", "grad", "fc", path="bias", norm=4.0),
    row(1, "backward", "grad_input", "fc"),
    row(1, "optimizer", "lr", path="0.0"),
    row(1, "optimizer", "loss_scale", path="0"),
    row(1, "optimizer", "param", "fc", path="weight"),
    row(1, "optimizer", "buffer", "fc", path="mean", posinf_count=1),
    row(1, "event", "skip", detail="skipped"),
    row(1, "forward", "output", "", op="DivBackward0"),
]


def test_a_thinned_step_keeps_what_a_watched_one_has():
    found = thinned(table(FULL_STEP), EVERY_OTHER, {"", "criterion"})
    assert told(found) == [
        (0, "param", "fc"),
        (30, "output", "mask"),
        (40, "output", ""),
        (50, "output", "criterion"),
        (60, "loss", None),
        (90, "grad_norm", None),
        (110, "lr", None),
        (120, "loss_scale", None),
        (140, "buffer", "fc"),
        (150, "skip", None),
    ]
    before = {one.seq: one for one in records(table(FULL_STEP))}
    assert [one for one in records(found) if one.tensor != "grad_norm"] == [
        before[seq] for seq in (0, 30, 40, 50, 60, 110, 120, 140, 150)
    ]
    assert found.schema == ARROW_SCHEMA


def test_the_norm_of_the_gradients_is_a_row_like_a_learning_rate():
    found = thinned(table(FULL_STEP), EVERY_OTHER, {""})
    assert next(one for one in records(found) if one.tensor == "grad_norm") == Record(
        step=1,
        seq=90,
        phase="backward",
        tensor="grad_norm",
        module=None,
        path="",
        call=None,
        micro_step=0,
        rank=3,
        time=TIME,
        dtype="float64",
        shape="[]",
        device="cpu",
        numel=1,
        nan_count=0,
        posinf_count=0,
        neginf_count=0,
        min=5.0,
        max=5.0,
        norm=5.0,
    )


def norms(rows: Iterable[Record], plan: Plan = EVERY_OTHER) -> list[tuple[int, int, float | None, int | None]]:
    found = records(thinned(table(rows), plan, {""}))
    return [(r.seq, r.micro_step, r.norm, r.nan_count) for r in found if r.tensor == "grad_norm"]


def test_each_backward_pass_has_a_norm_of_its_own():
    rows = [
        row(1, "loss", "loss"),
        row(1, "backward", "grad", "a", norm=2.0),
        row(1, "backward", "grad", "b", norm=3.0),
        row(1, "backward", "grad", "c", norm=6.0),
        row(1, "loss", "loss", micro_step=1),
        row(1, "backward", "grad", "a", micro_step=1, norm=8.0),
        row(1, "backward", "grad", "b", micro_step=1, norm=15.0),
        row(1, "loss", "loss", micro_step=1),  # a second loss on the same forward pass
        row(1, "backward", "grad", "a", micro_step=1, norm=7.0),
        row(1, "optimizer", "grad", "a", micro_step=1, norm=100.0),
        row(2, "backward", "grad", "a", norm=1.0),
        row(3, "backward", "grad", "a", norm=None),  # of no element
    ]
    assert norms(rows) == [(30, 0, 7.0, 0), (60, 1, 17.0, 0), (80, 1, 7.0, 0), (110, 0, 0.0, 0)]


def test_a_norm_too_large_to_square_is_right():
    rows = [row(1, "backward", "grad", "a", norm=3e200), row(1, "backward", "grad", "b", norm=4e200)]
    assert norms(rows) == [(10, 0, pytest.approx(5e200), 0)]


@pytest.mark.parametrize(
    ("bad", "counts"),
    [
        ({"nan_count": 1}, (1, 0, 0)),
        ({"posinf_count": 2}, (0, 1, 0)),
        ({"neginf_count": 1}, (0, 1, 0)),
        ({"nan_count": 1, "posinf_count": 1}, (1, 0, 0)),
    ],
)
def test_one_gradient_that_is_not_finite_makes_the_norm_so(bad, counts):
    rows = [row(1, "backward", "grad", "a", norm=2.0), row(1, "backward", "grad", "b", norm=3.0, **bad)]
    kept, last = records(thinned(table(rows), EVERY_OTHER, {""}))
    assert (kept.tensor, kept.seq) == ("grad_norm", 0)  # the bad gradient keeps its place
    assert (kept.nan_count, kept.posinf_count, kept.neginf_count) == counts
    assert (kept.min, kept.max, kept.norm) == (None, None, None)
    assert last == records(table(rows))[1]


def test_where_every_gradient_stays_the_norm_takes_the_place_of_what_goes_next():
    rows = [
        row(1, "input", "input", ""),
        row(1, "backward", "grad", "a", **NAN),
        row(1, "backward", "grad", "b", **NAN),
        row(1, "backward", "grad", "a", micro_step=1, **NAN),
        row(1, "optimizer", "param", "a"),
    ]
    found = thinned(table(rows), EVERY_OTHER, {""})
    assert told(found) == [
        (0, "grad_norm", None),
        (10, "grad", "a"),
        (20, "grad", "b"),
        (30, "grad", "a"),
        (40, "grad_norm", None),
    ]


def test_a_step_in_which_nothing_goes_stays_as_it_is():
    rows = [row(1, "backward", "grad", "a", **NAN), row(1, "loss", "loss")]
    assert records(thinned(table(rows), EVERY_OTHER, {""})) == records(table(rows))


def test_a_watched_step_stays_as_it_is():
    rows = [
        row(1, "forward", "output", ""),
        row(1, "loss", "loss"),
        row(1, "backward", "grad", "a", **NAN),
        row(1, "backward", "grad_norm", **NAN),
    ]
    assert records(thinned(table(rows), EVERY_OTHER, {""})) == records(table(rows))


def test_steps_that_the_plan_or_somebody_else_keeps_stay_in_full():
    rows = [one._replace(step=step) for step in range(8) for one in FULL_STEP]
    found = thinned(table(rows), Plan(full=4), {""}, lambda step: step == 3)
    by_step = {step: sum(one.step == step for one in records(found)) for step in range(8)}
    assert by_step == {0: 17, 1: 9, 2: 9, 3: 17, 4: 17, 5: 9, 6: 9, 7: 9}
    seqs = [one.seq for one in records(found)]
    assert seqs == sorted(set(seqs))


def test_thinning_in_steps_ends_where_thinning_at_once_does():
    rows = [one._replace(step=step) for step in range(16) for one in FULL_STEP]
    at_once = thinned(table(rows), Plan(full=8), {""})
    slowly = thinned(thinned(thinned(table(rows), Plan(2), {""}), Plan(4), {""}), Plan(8), {""})
    assert records(slowly) == records(at_once)


def test_in_the_end_losses_events_and_the_start_state_are_left():
    rows = [one._replace(step=step) for step in range(1, 5) for one in FULL_STEP]
    found = records(thinned(table(rows), Plan(full=8, watched=2), {""}, lambda step: step == 3))
    assert [one.tensor for one in found if one.step == 1] == ["param", "loss", "skip"]
    assert [one.tensor for one in found if one.step == 2] == [
        "param", "output", "output", "loss", "grad_norm", "lr", "loss_scale", "buffer", "skip",
    ]  # fmt: skip
    assert sum(one.step == 3 for one in found) == 17


def test_contents_name_the_full_steps_and_those_that_explain_a_failure():
    rows = [
        row(4, "forward", "output", ""),
        row(5, "backward", "grad_norm"),
        row(5, "event", "skip"),
        row(6, "event", "incident"),
        row(8, "forward", "output", "", op="DivBackward0"),
        row(9, "event", "replay"),
        row(9, "backward", "grad_norm"),
    ]
    assert contents(table(rows)) == (4, 9, [4, 6, 8], [6, 8, 9])


def protected(most: int, *steps: int) -> list[tuple[int, int]]:
    protection = Protection()
    for step in steps:
        protection.add(step)
    return [(window.start, window.stop - 1) for window in protection.ranges(most)]


def test_ten_steps_on_either_side_are_protected():
    assert protected(1000, 50) == [(40, 60)]
    assert protected(1000, 50, 51, 72) == [(40, 82)]
    assert protected(1000, 50, 72, 51, 100, 200) == [(40, 82), (190, 210), (90, 110)]
    assert protected(1000, 200, 191, 50, 175) == [(40, 60), (165, 210)]


def test_when_too_much_is_protected_the_first_incident_goes_before_the_latest_ones():
    assert protected(50, 50, 100, 200, 300) == [(40, 60), (290, 310), (190, 197)]
    assert protected(15, 50, 100) == [(40, 54)]
    assert protected(30, *range(50, 5000)) == [(40, 69)]


def test_a_lasting_incident_is_one_window():
    protection = Protection()
    for step in range(100_000):
        protection.add(step)
    assert protection.ranges(10**6) == [range(-10, 100_010)]
