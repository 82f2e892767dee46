"""The verdict where the first non-finite record is not the cause: earlier steps, masks, dead ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtrace.analysis.classify import Background, find_cause
from gradtrace.analysis.run import open_run
from gradtrace.analysis.scene import Scene
from gradtrace.analysis.verdict import first_nan
from gradtrace.analysis.verdict_model import Cause, Fate, Verdict
from gradtrace.errors import NoMatchError
from gradtrace.trace.incident import DETACHED
from gradtrace.trace.runinfo import ModuleInfo
from tests.analysis.rows import (
    ALL_NAN,
    INF,
    MODULES,
    NAN,
    NEGINF,
    PARAMS,
    Rows,
    backward,
    forward,
    healthy,
    open_rows,
    update,
)

_MASK: dict[str, Any] = {"neginf_count": 3, "min": 0.0, "max": 0.0, "norm": 0.0}


def _run(steps: int = 2) -> Rows:
    rows = Rows()
    rows.start(*((module, "param", path) for module, path in PARAMS))
    healthy(rows, steps)
    return rows


def _fatal_loss(rows: Rows) -> None:
    names = ("out", "fc2", "fc2_in", "fc2_grad", "act", "act_in", "fc1", "fc1_grad")
    backward(rows, None, NAN, **dict.fromkeys(names, ALL_NAN))
    update(rows, fc1=ALL_NAN, fc2=ALL_NAN)


def _verdict(tmp_path: Path, rows: Rows, question: dict[str, Any] | None = None, **info: Any) -> Verdict:
    with open_rows(tmp_path, rows, **info) as run:
        return first_nan(run, **(question or {}))


def _answer(verdict: Verdict) -> tuple[int, str, str | None, str]:
    answer = verdict.to_dict()
    return answer["step"], answer["phase"], answer["module"], answer["tensor"]


def test_a_recurrent_state_is_followed_back_to_the_step_that_made_it(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input", "0")
    rows.add("forward", "fc1", "input")
    state = rows.add("forward", "fc1", "output", **INF)
    rows.again("forward", "", "output", "1", state)  # an infinite state leaves the model, nothing else is bad
    rows.add("forward", "", "output", "0")
    backward(rows)
    update(rows)
    rows.step += 1
    rows.again("input", "", "input", "1", state)
    forward(rows, fc1=ALL_NAN, act_in=ALL_NAN, act=ALL_NAN, fc2_in=ALL_NAN, fc2=ALL_NAN, out=ALL_NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "fc1", "output")
    assert verdict.incident is not None and verdict.incident.first_step == 3


def test_a_buffer_that_was_bad_all_along_is_the_cause_when_it_is_first_used(tmp_path: Path) -> None:
    rows = Rows()
    rows.start(("act", "buffer", "scale"), **NAN)
    healthy(rows, 3)
    forward(rows, act=ALL_NAN, fc2_in=ALL_NAN, fc2=ALL_NAN, out=ALL_NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (0, "parameter", "act", "buffer")


def test_a_bad_buffer_that_poisons_later_steps_is_named_in_the_step_in_which_it_went_bad(
    tmp_path: Path,
) -> None:
    rows = _run()
    forward(rows)
    backward(rows)
    update(rows)
    rows.add("optimizer", "act", "buffer", "running_var", **NAN)
    for _ in range(3):
        rows.step += 1
        forward(rows)
        backward(rows)
        update(rows)
        rows.add("optimizer", "act", "buffer", "running_var", **NAN)
    rows.step += 1
    rows.add("evaluation", "act", "output", **ALL_NAN)
    rows.add("evaluation", "", "output", **ALL_NAN)
    assert _answer(_verdict(tmp_path, rows)) == (2, "forward", "act", "buffer")


def test_an_infinite_parameter_that_healthy_steps_used_is_not_blamed(tmp_path: Path) -> None:
    rows = Rows()
    rows.start(("fc2", "param", "weight"), **NEGINF)
    for _ in range(2):
        forward(rows)
        backward(rows)
        update(rows, fc2=NEGINF)
        rows.step += 1
    forward(rows, fc2=ALL_NAN, out=ALL_NAN)
    _fatal_loss(rows)
    assert _answer(_verdict(tmp_path, rows)) == (2, "forward", "fc2", "output")


def test_a_buffer_of_plus_infinity_that_waited_for_the_batch_that_reads_it_is_the_cause(tmp_path: Path) -> None:
    rows = Rows()  # class weights of 1 / 0 for a class that the first batches do not have
    rows.start(("criterion", "buffer", "weight"), posinf_count=1)
    for _ in range(2):
        forward(rows)
        backward(rows)
        update(rows)
        rows.add("optimizer", "criterion", "buffer", "weight", posinf_count=1)
        rows.step += 1
    forward(rows)
    rows.add("forward", "criterion", "input")
    rows.add("forward", "criterion", "output", **ALL_NAN)
    _fatal_loss(rows)
    assert _answer(_verdict(tmp_path, rows)) == (0, "parameter", "criterion", "buffer")


def test_a_parameter_that_is_found_bad_where_it_is_used_was_written_between_the_steps(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    rows.add("evaluation", "teacher", "input")
    rows.add("evaluation", "teacher", "param", "weight", **ALL_NAN)
    rows.add("evaluation", "teacher", "output", **ALL_NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "parameter", "teacher", "param")


def test_a_metric_that_is_only_looked_at_is_no_failure(tmp_path: Path) -> None:
    for detail, found in ((DETACHED, False), (None, True)):
        rows = _run()
        forward(rows)
        rows.add("forward", "recall", "input")
        rows.add("forward", "recall", "output", detail=detail, **ALL_NAN)
        backward(rows)
        update(rows)
        path = tmp_path / str(found)
        path.mkdir()
        modules = [ModuleInfo("recall", "Recall", root=True)]
        with open_rows(path, rows, modules=[*MODULES, *modules]) as run:
            assert first_nan(run).found is found


def test_a_boundary_that_healthy_steps_had_non_finite_is_passed_over(tmp_path: Path) -> None:
    rows = Rows()
    for _ in range(2):
        forward(rows, batch=NAN, fc1_in=NAN)  # holes in the data, filled by fc1
        backward(rows)
        update(rows)
        rows.step += 1
    forward(rows, batch=NAN, fc1_in=NAN, fc2=INF, out=ALL_NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "fc2", "output")
    tolerated = [row for row in verdict.contained if verdict.fates[row.seq] is Fate.TOLERATED]
    assert [(row.module, row.step) for row in tolerated] == [("", 0), ("fc1", 0)]


def test_a_new_kind_of_value_at_a_tolerated_boundary_is_not_tolerated(tmp_path: Path) -> None:
    rows = Rows()
    for _ in range(2):
        forward(rows, act=NEGINF, fc2_in=NEGINF)
        backward(rows)
        update(rows)
        rows.step += 1
    forward(rows, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    _fatal_loss(rows)
    assert _answer(_verdict(tmp_path, rows)) == (2, "forward", "act", "output")


def test_a_mask_is_passed_over_even_in_the_first_step(tmp_path: Path) -> None:
    rows = Rows()
    mask = rows.add("input", "", "input", "1", **_MASK)
    rows.add("input", "", "input", "0")
    rows.again("forward", "attn", "input", "1", mask)
    rows.add("forward", "attn", "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (0, "forward", "attn", "output")
    assert verdict.fates[mask.seq] is Fate.TOLERATED


def test_a_tensor_without_a_finite_element_is_no_mask(tmp_path: Path) -> None:
    rows = Rows()
    rows.add("input", "", "input", neginf_count=8, min=None, max=None, norm=None)
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    assert _answer(_verdict(tmp_path, rows)) == (0, "input", "", "input")


def test_if_all_on_the_path_is_tolerated_the_oldest_is_the_answer_with_a_remark() -> None:
    rows = Rows()
    forward(rows, act=NEGINF, fc2_in=NEGINF, fc2=NAN, out=NAN)
    finding = find_cause(Scene(rows.records, {""}), Background(is_tolerated=lambda row: True))
    assert (finding.row.module, finding.row.tensor) == ("act", "output")
    assert finding.all_tolerated


def test_a_value_that_died_in_the_next_module_is_contained(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    made = rows.add("forward", "fc1", "output", **INF)
    rows.again("forward", "act", "input", "0", made)
    rows.add("forward", "act", "output")
    rows.add("forward", "fc2", "input")
    rows.add("forward", "fc2", "output", **NAN)
    rows.add("forward", "", "output", **NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "fc2", "output")
    assert verdict.contained == (made, rows.records[made.seq + 1])
    assert verdict.fates[made.seq] is Fate.CONTAINED


def test_a_value_that_was_masked_forward_but_poisons_the_backward_is_the_cause(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    rows.add("forward", "fc1", "input")
    made = rows.add("forward", "fc1", "output", **INF)
    rows.again("forward", "act", "input", "0", made)
    rows.add("forward", "act", "output")
    rows.add("forward", "", "output")
    rows.scalar("loss", "loss", 1.0)
    rows.add("backward", "act", "grad_output")
    rows.add("backward", "act", "grad_input", **NAN)
    rows.add("backward", "fc1", "grad_output", **NAN)
    rows.add("backward", "fc1", "grad", "weight", **NAN)
    assert _answer(_verdict(tmp_path, rows)) == (2, "forward", "fc1", "output")


def test_a_checkpoints_recomputation_is_not_reported_again(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    rows.add("forward", "fc1", "input")
    first = rows.add("forward", "fc1", "output", **INF)
    rows.add("forward", "", "output", **INF)
    rows.scalar("loss", "loss", None, **INF)
    rows.add("recompute", "fc1", "input")
    rows.again("recompute", "fc1", "output", "0", first)
    rows.add("backward", "fc1", "grad", "weight", **NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "fc1", "output")
    assert verdict.to_dict()["seq"] == first.seq


def test_of_a_module_called_twice_the_failing_call_is_named(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    for call in (0, 1):
        rows.add("forward", "fc1", "input", call=call)
        rows.add("forward", "fc1", "output", call=call, **(NAN if call else {}))
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    assert _verdict(tmp_path, rows).to_dict()["call"] == 1


def test_a_healed_incident_before_a_fatal_one_is_listed_and_not_chosen(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, None, NAN)  # the gradients are finite: it heals
    update(rows)
    rows.step += 1
    healthy(rows, 2)
    forward(rows, fc2=NAN, out=NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (5, "forward", "fc2", "output")
    assert [(i.first_step, i.last_step, i.ended, i.chosen) for i in verdict.incidents] == [
        (2, 2, True, False),
        (5, 5, False, True),
    ]
    first = _verdict(tmp_path / "again", rows, {"incident": 1})
    assert _answer(first) == (2, "loss", None, "loss")


def test_an_incident_number_the_run_lacks_is_said_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(NoMatchError, match="there is no incident 3: the run has no incident"):
        _verdict(tmp_path, _run(), {"incident": 3})


def test_steps_limit_the_search_for_incidents(tmp_path: Path) -> None:
    rows = _run()
    for _ in range(2):
        forward(rows)
        backward(rows, None, NAN)
        update(rows)
        rows.step += 1
        healthy(rows, 1)
    assert _answer(_verdict(tmp_path / "a", rows, {"steps": (3, None)}))[0] == 4
    assert not _verdict(tmp_path / "b", rows, {"steps": (3, 4)}).found
    with pytest.raises(NoMatchError, match="no recorded step lies in 9:12; the run has 0 to 5"):
        _verdict(tmp_path / "c", rows, {"steps": (9, 12)})


def test_gradients_of_a_step_that_the_scaler_skipped_are_no_incident(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, out=INF, fc2=INF, fc2_in=NAN, fc2_grad=NAN, act=NAN, act_in=NAN, fc1=NAN, fc1_grad=NAN)
    rows.skip()
    rows.step += 1
    healthy(rows, 2)
    assert not _verdict(tmp_path, rows).found


def test_ten_skipped_steps_in_a_row_are_an_incident_that_starts_with_the_first(tmp_path: Path) -> None:
    rows = _run()
    for _ in range(10):
        forward(rows)
        backward(rows, act_in=INF, fc1=INF, fc1_grad=NAN)
        rows.skip()
        rows.step += 1
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "backward", "act", "grad_input")
    assert verdict.incidents[0].reached == ("skips",)
    assert verdict.to_dict()["reached"] == []
    assert not verdict.handled  # it never ended


def _with_skips(*skipped: int, steps: int) -> Rows:
    """A run in which the gradient of ``act`` overflows in some steps, while the loss scale is 2 ** step."""
    rows = Rows()
    for step in range(steps):
        bad = {"act_in": INF, "fc1": INF, "fc1_grad": NAN} if step in skipped else {}
        forward(rows)
        backward(rows, **bad)
        rows.scalar("optimizer", "loss_scale", 2.0**step, "0")
        rows.skip() if step in skipped else update(rows)
        rows.step += 1
    return rows


def test_what_made_the_scaler_skip_is_named_when_asked(tmp_path: Path) -> None:
    rows = _with_skips(2, 3, 6, steps=8)
    assert not _verdict(tmp_path / "a", rows).found
    verdict = _verdict(tmp_path / "b", rows, {"skipped": True})
    assert _answer(verdict) == (2, "backward", "act", "grad_input")
    assert verdict.loss_scales == ((2, 4.0), (3, 8.0))
    spans = [(one.first_step, one.last_step, one.ended, one.chosen) for one in verdict.incidents]
    assert spans == [(2, 3, True, True), (6, 6, True, False)]
    second = _verdict(tmp_path / "c", rows, {"skipped": True, "incident": 2})
    assert _answer(second) == (6, "backward", "act", "grad_input")
    assert second.loss_scales == ((6, 64.0),)
    assert _answer(_verdict(tmp_path / "d", rows, {"skipped": True, "steps": (4, 8)}))[0] == 6


def test_skips_up_to_the_end_of_the_run_are_asked_about_first(tmp_path: Path) -> None:
    verdict = _verdict(tmp_path, _with_skips(1, 4, 5, steps=6), {"skipped": True})
    assert [(one.first_step, one.ended, one.chosen) for one in verdict.incidents] == [
        (1, True, False),
        (4, False, True),
    ]


def test_of_a_run_without_skips_there_is_nothing_to_name(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, fc1=NAN, act_in=NAN, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    _fatal_loss(rows)
    assert not _verdict(tmp_path, rows, {"skipped": True}).found


def test_what_a_skipped_step_had_non_finite_is_not_tolerated_later(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, act_in=INF, fc1=INF, fc1_grad=INF)
    rows.skip()
    rows.step += 1
    healthy(rows, 1)
    forward(rows)
    backward(rows, act_in=INF, fc1=INF, fc1_grad=INF)
    update(rows, fc1=NAN)
    assert _answer(_verdict(tmp_path, rows)) == (4, "backward", "act", "grad_input")


def test_a_batch_that_the_script_skips_is_handled(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, fc1=INF, act_in=INF, act=INF, fc2_in=INF, fc2=NAN, out=NAN)
    forward(rows)  # the next batch, in the same optimizer step
    backward(rows)
    update(rows)
    rows.step += 1
    healthy(rows, 1)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "fc1", "output")
    assert verdict.handled
    assert verdict.to_dict()["reached"] == []


def test_a_batch_that_is_skipped_but_spoils_the_evaluation_is_not_handled(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, fc1=INF, act_in=INF, act=INF, fc2_in=INF, fc2=NAN, out=NAN)
    rows.add("input", "", "input")
    rows.add("evaluation", "", "output", call=1, **ALL_NAN)
    assert not _verdict(tmp_path, rows).handled


def test_a_bad_loss_in_a_step_that_the_scaler_skipped_is_handled_if_it_healed(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, None, NAN, out=NAN, fc2=NAN, fc2_in=NAN, fc2_grad=NAN)
    rows.skip()
    rows.step += 1
    healthy(rows, 1)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "loss", None, "loss")
    assert verdict.handled


def test_a_bad_loss_that_was_handed_to_backward_is_not_handled(tmp_path: Path) -> None:
    rows = _run()
    forward(rows)
    backward(rows, None, NAN)
    update(rows)
    assert not _verdict(tmp_path, rows).handled


def test_an_unrecorded_gap_leaves_a_candidate_and_says_what_to_run(tmp_path: Path) -> None:
    rows = Rows()
    healthy(rows, 1)
    rows.step = 10
    forward(rows, fc1=NAN, act_in=NAN, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows, config={"every": 10}, command=["train.py", "--lr", "3"])
    (candidate,) = verdict.candidates
    assert (candidate.phase, candidate.module) == ("parameter", "fc1")
    assert "steps 1 to 9 were not recorded" in candidate.why
    assert candidate.next == "gradtrace record --steps 1:11 train.py --lr 3"


def test_a_module_that_was_left_out_remains_a_candidate(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    rows.add("forward", "", "output", **NAN)
    rows.scalar("loss", "loss", None, **NAN)
    modules = [ModuleInfo("", "Net", root=True, calls=3), ModuleInfo("fc1", "Linear", depth=1)]
    verdict = _verdict(tmp_path, rows, modules=modules, config={"exclude": ["fc*"]})
    assert [candidate.module for candidate in verdict.candidates] == ["fc1"]


def test_a_buffer_that_is_bad_at_the_end_of_the_step_may_have_been_so_before(tmp_path: Path) -> None:
    rows = _run()
    forward(rows, act=NAN, fc2_in=NAN, fc2=NAN, out=NAN)
    _fatal_loss(rows)
    rows.add("optimizer", "act", "buffer", "running_var", **NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "act", "output")
    assert [(c.phase, c.module, c.tensor) for c in verdict.candidates] == [("parameter", "act", "buffer")]


def test_a_bad_gradient_elsewhere_leaves_a_second_reading(tmp_path: Path) -> None:
    rows = _run()
    rows.add("input", "", "input")
    for name, bad in (("left", INF), ("right", {})):  # the root's own code takes what both return
        rows.add("forward", name, "input")
        rows.add("forward", name, "output", **bad)
    rows.add("forward", "", "output")
    rows.add("backward", "right", "grad_output")
    rows.add("backward", "right", "grad_input", **NAN)
    rows.add("backward", "right", "grad", "weight", **NAN)
    verdict = _verdict(tmp_path, rows)
    assert _answer(verdict) == (2, "forward", "left", "output")
    assert [(c.phase, c.module, c.tensor) for c in verdict.candidates] == [("backward", "right", "grad_input")]


def test_context_and_history_are_the_records_before_and_the_steps_before(tmp_path: Path) -> None:
    rows = _run(steps=7)
    forward(rows, fc2=NAN, out=NAN)
    _fatal_loss(rows)
    verdict = _verdict(tmp_path, rows, {"context": 3})
    assert [(row.module, row.tensor) for row in verdict.context] == [
        ("act", "input"),
        ("act", "output"),
        ("fc2", "input"),
    ]
    assert [row.step for row in verdict.history] == [2, 3, 4, 5, 6]
    assert {(row.module, row.tensor) for row in verdict.history} == {("fc2", "output")}
    assert _verdict(tmp_path / "none", rows, {"context": 0}).context == ()


def test_an_unused_bad_parameter_and_a_dead_gradient_are_contained(tmp_path: Path) -> None:
    rows = Rows()
    rows.start(("fc2", "param", "token"), **NAN)
    healthy(rows, 2)
    forward(rows)
    backward(rows, out=NAN)  # dies in the next module
    update(rows)
    rows.add("optimizer", "fc2", "param", "token", **NAN)
    verdict = _verdict(tmp_path, rows)
    assert not verdict.found
    assert [(row.module, row.tensor) for row in verdict.contained] == [("fc2", "param"), ("", "grad_output")]


def _rank(rank: int, bad: str) -> Rows:
    rows = Rows(rank=rank)
    healthy(rows, 2)
    if bad == "makes":
        forward(rows, fc1=INF, act_in=INF, act=INF, fc2_in=INF, fc2=NAN, out=NAN)
        _fatal_loss(rows)
    else:
        forward(rows)
        backward(rows)
        rows.add("optimizer", "fc1", "grad", "weight", **NAN)
        update(rows, fc1=NAN, fc2=NAN)
    return rows


def test_what_one_rank_made_the_others_received(tmp_path: Path) -> None:
    for rank, bad in ((0, "receives"), (1, "makes"), (2, "receives")):
        open_rows(tmp_path, _rank(rank, bad), rank=rank, world_size=3).close()
    with open_rows(tmp_path, _rank(3, "receives"), rank=3, world_size=4) as run:
        verdict = first_nan(run)
        alone = first_nan(run, rank=2)
    answer = verdict.to_dict()
    assert (answer["rank"], answer["module"], answer["received_by"]) == (1, "fc1", [0, 2, 3])
    assert answer["reached"] == ["loss", "grad", "param"]  # as on rank 1: the others only received gradients
    assert alone.finding is not None and alone.finding.cause is Cause.CHANGED_GRADIENT
    assert alone.finding.row.rank == 2


@pytest.mark.parametrize(("first", "later"), [(0, 1), (1, 0)])
def test_of_ranks_that_compute_together_the_one_that_came_to_it_first_made_it(
    tmp_path: Path, first: int, later: int
) -> None:
    for rank in (0, 1):
        rows = Rows(rank=rank)
        healthy(rows, 2)
        bad = {"fc1": INF, "act_in": INF, "act": INF} if rank == first else {}
        forward(rows, **bad, fc2_in=NAN, fc2=NAN, out=NAN)
        _fatal_loss(rows)
        open_rows(tmp_path, rows, rank=rank, world_size=2).close()
    with open_run(tmp_path / "run.parquet") as run:
        answer = first_nan(run).to_dict()
    assert (answer["rank"], answer["module"]) == (first, "fc1")
    [other] = answer["candidates"]
    assert other["why"].startswith(f"rank {later} made a non-finite value of its own in the same step, or received it")


def test_a_rank_that_the_run_lacks_is_said_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(NoMatchError, match="has no rank 7; it has: 0"):
        _verdict(tmp_path, _run(), {"rank": 7})
