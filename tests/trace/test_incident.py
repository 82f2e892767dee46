"""Which steps matter, and where incidents start and end."""

from __future__ import annotations

from typing import Any

from gradtrace.trace.incident import SKIPS_IN_A_ROW, IncidentFinder
from gradtrace.trace.schema import Record


def _row(step: int, phase: str, tensor: str, module: str | None = "", **values: Any) -> Record:
    return Record(step=step, seq=values.pop("seq", step * 10), phase=phase, tensor=tensor, module=module, **values)


def _loss(step: int, **values: Any) -> Record:
    return _row(step, "loss", "loss", None, **({} if "posinf_count" in values else {"nan_count": 1}) | values)


def _grad(step: int, **values: Any) -> Record:
    return _row(step, "backward", "grad", "fc", path="weight", nan_count=1, **values)


def _buffer(step: int, phase: str = "optimizer", **values: Any) -> Record:
    return _row(step, phase, "buffer", "bn", path="running_var", **values)


def _found(finder: IncidentFinder) -> list[tuple[int, int, list[str], bool]]:
    return [(i.first_step, i.last_step, i.reached, i.ended) for i in finder.incidents]


def test_an_incident_lasts_until_a_step_is_finite_throughout() -> None:
    finder = IncidentFinder([""])
    answers = [finder.add_step(step, [_loss(step)] if step in (2, 3, 6) else []) for step in range(7)]
    assert answers == [False, False, True, True, False, False, True]
    assert _found(finder) == [(2, 3, ["loss"], True), (6, 6, ["loss"], False)]


def test_the_norm_of_all_gradients_does_not_matter_beside_the_gradients() -> None:
    finder = IncidentFinder(["", "fc"])
    norm = _row(0, "backward", "grad_norm", None, nan_count=1)
    assert not finder.add_step(0, [norm])
    assert finder.add_step(1, [norm, _grad(1)])
    assert _found(finder) == [(1, 1, ["grad"], False)]


def test_reached_lists_each_kind_once_in_the_order_of_seq() -> None:
    finder = IncidentFinder([""])
    finder.add_step(0, [_grad(0, seq=9), _loss(0, seq=4)])
    param = _row(1, "optimizer", "param", "fc", path="weight", nan_count=2)
    finder.add_step(1, [param, _loss(1)])
    assert _found(finder) == [(0, 1, ["loss", "grad", "param"], False)]


def test_a_roots_output_matters_with_a_nan_and_not_with_an_infinity() -> None:
    finder = IncidentFinder([""])
    assert not finder.add_step(0, [_row(0, "forward", "output", neginf_count=4)])
    assert not finder.add_step(1, [_row(1, "forward", "output", "fc", nan_count=1)])
    assert not finder.add_step(2, [_row(2, "recompute", "output", nan_count=1)])
    assert finder.add_step(3, [_row(3, "evaluation", "output", nan_count=1)])


def test_gradients_at_module_boundaries_and_inputs_do_not_matter_by_themselves() -> None:
    finder = IncidentFinder([""])
    rows = [_row(0, "backward", tensor, nan_count=1) for tensor in ("grad_output", "grad_input", "input")]
    assert not finder.add_step(0, rows)


def test_a_state_that_was_non_finite_from_the_start_matters_only_when_it_holds_more() -> None:
    finder = IncidentFinder([""])
    assert not finder.add_step(0, [_buffer(0, "input", posinf_count=2), _buffer(0, posinf_count=2)])
    assert not finder.add_step(1, [_buffer(1, posinf_count=1)])
    assert finder.add_step(2, [_buffer(2, posinf_count=2, nan_count=1)])


def test_a_mask_that_is_registered_later_does_not_matter_and_a_sentinel_that_overflows_does() -> None:
    finder = IncidentFinder([""])
    assert not finder.add_step(0, [_buffer(0, numel=9, neginf_count=3, min=0.0, max=0.0)])
    assert finder.add_step(1, [_buffer(1, numel=9, posinf_count=3, min=0.0, max=2.0)])


def test_what_a_skipped_step_overflowed_does_not_matter_but_a_nan_loss_does() -> None:
    finder = IncidentFinder([""])
    assert not finder.add_step(0, [_grad(0), _loss(0, posinf_count=1)], skipped=True)
    assert finder.add_step(1, [_grad(1), _loss(1)], skipped=True)
    assert _found(finder) == [(1, 1, ["loss"], False)]


def test_a_skipped_step_does_not_end_an_incident() -> None:
    finder = IncidentFinder([""])
    finder.add_step(0, [_loss(0)], skipped=True)
    finder.add_step(1, [_grad(1)], skipped=True)
    finder.add_step(2, [_loss(2)], skipped=True)
    assert _found(finder) == [(0, 2, ["loss"], False)]
    finder.add_step(3, [])
    assert _found(finder) == [(0, 2, ["loss"], True)]


def test_ten_skips_in_a_row_are_an_incident_from_the_first_of_them() -> None:
    finder = IncidentFinder([""])
    finder.add_step(0, [])
    answers = [finder.add_step(step, [_grad(step)], skipped=True) for step in range(1, SKIPS_IN_A_ROW + 2)]
    assert answers == [False] * (SKIPS_IN_A_ROW - 1) + [True, True]
    assert _found(finder) == [(1, SKIPS_IN_A_ROW + 1, ["skips"], False)]


def test_skips_with_a_step_between_are_no_row() -> None:
    finder = IncidentFinder([""])
    assert not any(finder.add_step(step, [], skipped=step % 10 != 9) for step in range(40))


def test_a_loss_scale_below_one_is_an_incident() -> None:
    finder = IncidentFinder([""])
    assert not finder.add_step(0, [_row(0, "optimizer", "loss_scale", None, max=1.0)])
    assert finder.add_step(1, [_row(1, "optimizer", "loss_scale", None, max=0.5)])
    assert _found(finder) == [(1, 1, ["skips"], False)]


def test_roots_may_become_known_while_steps_come_in() -> None:
    roots: list[str] = []
    finder = IncidentFinder(roots)
    output = _row(0, "forward", "output", "critic", nan_count=1)
    assert not finder.add_step(0, [output])
    roots.append("critic")
    assert finder.add_step(1, [output])
