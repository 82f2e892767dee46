"""Stacks for the loss code, and nobody who could notice: the user's anomaly mode is the user's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from capture.losses import leaf
from torch import Tensor

from gradtrace.capture.loss.lines import LossLines
from gradtrace.capture.operations.stacks import stack_of

NAME = "test_stacks_are_noted_without_their_code_which_is_looked_up_later"


@pytest.fixture
def lines() -> Iterator[LossLines]:
    lines = LossLines()
    lines.install()
    yield lines
    lines.remove()
    assert mode() == (False, True)
    assert torch.set_anomaly_enabled is torch._C.set_anomaly_enabled
    assert torch.is_anomaly_enabled is torch._C.is_anomaly_enabled
    assert torch.is_anomaly_check_nan_enabled is torch._C.is_anomaly_check_nan_enabled


def mode() -> tuple[bool, bool]:
    """Return torch's real setting: whether stacks are noted, and whether NaN is looked for."""
    return torch._C.is_anomaly_enabled(), torch._C.is_anomaly_check_nan_enabled()


def detect_anomaly() -> torch.autograd.detect_anomaly:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autograd.detect_anomaly()


def has_stack(tensor: Tensor) -> bool:
    return bool(stack_of(tensor.grad_fn))


def test_stacks_are_noted_between_a_root_and_backward(lines: LossLines) -> None:
    x = leaf(1.0)
    lines.call_begins()
    inside = x * 2
    lines.call_ended(has_graph=True)
    loss = inside.sum()
    lines.backward_begins(create_graph=False)
    loss.backward()
    lines.backward_ended(keeps_graph=False)
    after = x * 2

    assert [has_stack(tensor) for tensor in (inside, loss, after)] == [False, True, False]
    assert stack_of(loss.grad_fn)[-1].code == "loss = inside.sum()"


def test_a_call_without_a_graph_opens_nothing(lines: LossLines) -> None:
    lines.call_begins()
    lines.call_ended(has_graph=False)
    assert mode() == (False, True)


def test_other_calls_and_passes_only_interrupt(lines: LossLines) -> None:
    lines.call_begins()
    lines.call_ended(has_graph=True)
    lines.call_begins()
    assert mode() == (False, True)
    lines.call_ended(has_graph=False)  # a teacher under no_grad
    assert mode() == (True, False)
    lines.backward_begins(create_graph=True)
    assert mode() == (True, False)
    lines.backward_ended(keeps_graph=True)
    assert mode() == (True, False)
    lines.backward_begins(create_graph=False)
    assert mode() == (False, True)
    lines.backward_ended(keeps_graph=True)
    assert mode() == (True, False)
    lines.end()
    assert mode() == (False, True)


def test_the_user_reads_what_the_user_has_set(lines: LossLines) -> None:
    lines.call_ended(has_graph=True)
    assert mode() == (True, False)
    assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (False, True)


def test_the_user_s_anomaly_mode_is_left_on(lines: LossLines) -> None:
    with detect_anomaly():
        lines.call_begins()
        lines.call_ended(has_graph=True)
        assert mode() == (True, True)
        lines.backward_begins(create_graph=False)
        assert mode() == (True, True)
        lines.backward_ended(keeps_graph=False)
        assert mode() == (True, True)
    assert mode() == (False, True)


def test_anomaly_mode_for_a_part_of_the_loss_code_is_put_back_by_its_own_context(lines: LossLines) -> None:
    lines.call_ended(has_graph=True)
    with detect_anomaly():
        assert mode() == (True, True)
        lines.call_begins()
        assert mode() == (True, True)
        lines.call_ended(has_graph=False)
        assert mode() == (True, True)
    assert mode() == (True, False)
    lines.backward_begins(create_graph=False)
    assert mode() == (False, True)


def test_the_mode_that_is_switched_on_in_the_loss_code_stays_on(lines: LossLines) -> None:
    lines.call_ended(has_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.set_detect_anomaly(True, check_nan=False)
    lines.backward_begins(create_graph=False)
    lines.backward_ended(keeps_graph=False)
    lines.end()
    assert mode() == (True, False)
    torch.autograd.set_detect_anomaly(False)


def test_the_mode_that_is_switched_off_inside_of_a_call_stays_off_there(lines: LossLines) -> None:
    lines.call_ended(has_graph=True)
    lines.call_begins()
    with detect_anomaly():
        assert mode() == (True, True)
    assert mode() == (False, True)
    lines.call_ended(has_graph=False)
    assert mode() == (True, False)


def test_a_setting_past_torch_s_functions_is_not_undone() -> None:
    lines = LossLines()
    lines.install()
    lines.call_ended(has_graph=True)
    torch._C.set_anomaly_enabled(True, True)
    lines.remove()
    assert mode() == (True, True)
    torch._C.set_anomaly_enabled(False, True)


def test_removing_in_the_middle_of_the_loss_code_leaves_nothing_on() -> None:
    lines = LossLines()
    lines.install()
    lines.call_ended(has_graph=True)
    assert lines.noting
    lines.remove()
    assert not lines.noting
    assert mode() == (False, True)


def test_stacks_are_noted_without_their_code_which_is_looked_up_later(lines: LossLines) -> None:
    lines.call_ended(has_graph=True)
    noted = leaf(1.0).sum()
    with detect_anomaly():
        noted_for_the_user = leaf(1.0).sum()

    def innermost(tensor: Tensor) -> str:
        own = [frame for frame in tensor.grad_fn.metadata["traceback_"] if __file__ in frame]
        return own[-1].partition(", in ")[2]

    assert innermost(noted) == f"{NAME}\n"
    assert innermost(noted_for_the_user) == f"{NAME}\n    noted_for_the_user = leaf(1.0).sum()\n"
    assert stack_of(noted.grad_fn)[-1].code == "noted = leaf(1.0).sum()"
    assert stack_of(noted.grad_fn)[-1].function == NAME


def test_a_backward_that_fails_under_the_user_s_anomaly_mode_can_print_what_was_noted(lines: LossLines) -> None:
    lines.call_ended(has_graph=True)
    loss = leaf(0.0).log().mul(0).sum()
    lines.backward_begins(create_graph=False)
    with (
        detect_anomaly(),
        pytest.warns(UserWarning, match="Error detected in LogBackward0"),
        pytest.raises(RuntimeError, match="LogBackward0"),
    ):
        loss.backward()
    lines.backward_ended(keeps_graph=False)


def test_nothing_is_warned_about(lines: LossLines) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lines.call_ended(has_graph=True)
        lines.backward_begins(create_graph=False)
    assert said == []
