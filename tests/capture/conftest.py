"""What the tests of the capture share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

_CALL = nn.Module.__call__


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _the_same_numbers_in_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """A recording that goes on after its test would be seen by others, much later."""
    yield
    left, nn.Module.__call__ = nn.Module.__call__, _CALL  # type: ignore[method-assign]
    assert left is _CALL


@pytest.fixture
def no_optimizer_from_before() -> None:
    """Optimizers of other tests would be taken for those that end the steps: one that is kept says so here."""
    gc.collect()
    kept = [kept for kept in gc.get_objects() if issubclass(type(kept), torch.optim.Optimizer)]
    assert not kept, "an earlier test keeps its optimizer"
