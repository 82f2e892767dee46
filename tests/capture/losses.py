"""Runs a loss and its backward pass under ``LossCode`` alone, without a recording around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.capture.clock import Clock
from gradtrace.capture.graph import Edge
from gradtrace.capture.loss.code import LossCode, nothing_known
from gradtrace.capture.loss.forward import LossFinding
from gradtrace.capture.loss.region import Interval
from gradtrace.capture.loss.values import Known
from gradtrace.capture.names import Names
from gradtrace.capture.operations.births import Birth
from gradtrace.capture.rows import RowBuffer
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.session import Session
from gradtrace.capture.statistics import Statistics

INF = float("inf")
NAN = float("nan")


@dataclass(frozen=True)
class Examined:
    """What was found before and in the backward pass of a loss, and the gradients that it left."""

    finding: LossFinding | None
    backward: list[Birth]
    gradients: list[Tensor | None]
    session: Session

    @property
    def forward(self) -> list[Birth]:
        """The births of the forward pass."""
        return self.finding.births if self.finding is not None else []


def leaf(*values: float) -> Tensor:
    """Return a vector that stands for the output of a model."""
    return torch.tensor(values, requires_grad=True)


def new_session(*, on_device: bool | None = None) -> Session:
    return Session(Names((), ()), Schedule(), Clock(0), RowBuffer(0), Statistics(on_device=on_device))


def examine(
    loss: Callable[..., Tensor],
    *outputs: Tensor,
    inside: Iterable[Interval] = (),
    known: Callable[[Edge], Known] = nothing_known,
    on_device: bool | None = None,
) -> Examined:
    """Run ``loss(*outputs)`` with stacks noted, and its backward pass."""
    with stacks():
        value = loss(*outputs)
    return examine_backward([value], outputs, inside=inside, known=known, on_device=on_device)


def examine_backward(
    losses: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    inside: Iterable[Interval] = (),
    known: Callable[[Edge], Known] = nothing_known,
    on_device: bool | None = None,
) -> Examined:
    session = new_session(on_device=on_device)
    code = LossCode(session)
    finding = code.backward_begins(losses, inside, known)
    torch.autograd.backward(list(losses))
    code.backward_ended()
    session.statistics.resolve()
    assert session.failure is None
    return Examined(finding, code.births(), [tensor.grad for tensor in leaves], session)


@contextmanager
def stacks() -> Iterator[None]:
    """Note stacks, as between a model's outputs and ``backward()``."""
    torch._C.set_anomaly_enabled(True, False)
    try:
        yield
    finally:
        torch._C.set_anomaly_enabled(False, True)


def ops(births: Iterable[Birth]) -> list[str]:
    return [birth.op for birth in births]


def operands(birth: Birth) -> dict[str, tuple[float | None, float | None]]:
    """Return min and max of a birth's operands, by name."""
    return {operand.path: (operand.measure.min, operand.measure.max) for operand in birth.operands}


def counts(birth: Birth) -> tuple[int, int, int]:
    """Return how many NaN, +Inf and -Inf a birth made."""
    return birth.result.nan, birth.result.posinf, birth.result.neginf
