"""Which addend of a composite loss is non-finite, in the words of its line."""

from __future__ import annotations

import pytest
import torch
from capture.losses import INF, NAN, Examined, examine, examine_backward, leaf, stacks
from torch import Tensor


def term_of(found: Examined) -> str | None:
    assert found.finding is not None
    return found.finding.term


def line_of(function: object, offset: int) -> int:
    return function.__code__.co_firstlineno + offset  # type: ignore[attr-defined]


def test_the_addend_is_said_in_the_words_of_its_line() -> None:
    def loss(x: Tensor) -> Tensor:
        reconstruction, kl, size = x.pow(2).mean(), x.log().sum(), x.sum()
        return reconstruction + 0.1 * kl + size

    term = term_of(examine(loss, leaf(0.0, 1.0)))

    assert term == f"term 2 of 3: MulBackward0, test_loss_terms.py:{line_of(loss, 2)}: 0.1 * kl"


def test_constants_are_no_addends_and_a_subtraction_is_a_sum() -> None:
    def loss(x: Tensor) -> Tensor:
        entropy = x.sum().log()
        return 1.0 + x.mean() - entropy + 1e-3

    term = term_of(examine(loss, leaf(0.0, 0.0)))

    assert term == f"term 2 of 2: LogBackward0, test_loss_terms.py:{line_of(loss, 2)}: entropy"


def test_of_sums_of_sums_the_innermost_is_said() -> None:
    def loss(x: Tensor) -> Tensor:
        bad = x.log().sum()
        inner = x.mean() + 3 * bad
        total = x.sum() + inner / 2
        return total * 4

    term = term_of(examine(loss, leaf(0.0, 1.0)))

    assert term == f"term 2 of 2: MulBackward0, test_loss_terms.py:{line_of(loss, 2)}: 3 * bad"


def test_a_sum_that_is_added_to_in_a_loop_counts_its_addends() -> None:
    def loss(x: Tensor) -> Tensor:
        total = x.sum()
        for value in x:
            total = total + value.log()
        return total

    term = term_of(examine(loss, leaf(1.0, 0.0, 2.0)))

    assert term == f"term 3 of 4: LogBackward0, test_loss_terms.py:{line_of(loss, 3)}"


def test_a_sum_of_several_lines_names_the_line_of_the_addend() -> None:
    def loss(x: Tensor) -> Tensor:
        kl = x.log().sum()
        return sum(
            [
                x.mean(),
                kl,
            ]
        )

    term = term_of(examine(loss, leaf(0.0, 1.0)))

    assert term == f"term 2 of 2: SumBackward0, test_loss_terms.py:{line_of(loss, 1)}: kl = x.log().sum()"


@pytest.mark.parametrize("combine", ["torch.stack([mean, kl]).sum()", "sum([mean, kl])", "mean.add(kl)"])
def test_a_stack_or_a_list_that_is_added_up_is_a_sum(combine: str) -> None:
    def loss(x: Tensor) -> Tensor:
        return eval(combine, {"torch": torch, "mean": x.mean(), "kl": x.log().sum()})

    term = term_of(examine(loss, leaf(0.0, 1.0)))

    assert term is not None
    assert term.startswith("term 2 of 2: SumBackward0")


def test_all_bad_addends_are_said() -> None:
    def loss(x: Tensor) -> Tensor:
        a, b, c = x.log().sum(), x.sum(), x.mean().log()
        return a + b + c

    term = term_of(examine(loss, leaf(0.0, 0.0)))

    place = f"test_loss_terms.py:{line_of(loss, 2)}"
    assert term == f"term 1 of 3: SumBackward0, {place}: a; term 3 of 3: LogBackward0, {place}: c"


def test_of_very_many_bad_addends_the_first_are_said() -> None:
    def loss(x: Tensor) -> Tensor:
        return sum(value.log() for value in x)

    term = term_of(examine(loss, leaf(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)))

    place = f"test_loss_terms.py:{line_of(loss, 1)}"
    said = "; ".join(f"term {number} of 6: LogBackward0, {place}" for number in (1, 3, 4))
    assert term == f"{said}; and 2 more"


def test_without_stacks_the_operation_is_said() -> None:
    x = leaf(0.0, 1.0)
    loss = x.mean() + 2 * x.log().sum() - x.sum()
    assert term_of(examine_backward([loss], [x])) == "term 2 of 3: MulBackward0"


@pytest.mark.parametrize("value", [NAN, INF])
def test_an_addend_that_is_not_known_is_named_only_where_no_other_can_have_been_it(value: float) -> None:
    hidden = torch.tensor([value, 1.0], requires_grad=True) * 1
    start = hidden.grad_fn._sequence_nr()
    with stacks():
        loss = hidden.sum() + torch.ones(2, requires_grad=True).sum()

    term = term_of(examine_backward([loss], [], inside=[(start, start + 1)]))

    # Infinity may be the sum of two finite numbers.
    expected = "term 1 of 2: SumBackward0" if value is NAN else None
    assert (term is None) == (expected is None)
    assert expected is None or (term or "").startswith(expected)


def test_a_loss_that_is_no_sum_has_no_terms() -> None:
    assert term_of(examine(lambda x: (x.log() + 1).mean(), leaf(0.0, 1.0))) is None
