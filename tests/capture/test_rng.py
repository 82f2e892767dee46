"""Generators' states: what is drawn after they are put back is what was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradtrace.capture.replay.rng import Rng


def draw() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(3).tolist(), random.random()


@pytest.mark.parametrize("quickly", [False, True])
def test_what_is_drawn_after_a_restore_is_drawn_again(quickly: bool) -> None:
    for _ in range(3):
        state = Rng.now(quickly=quickly)
        first = draw()
        np.random.randn()  # three and one: no half of a pair is left over
        state.restore()
        assert draw() == first
        np.random.randn()


def test_half_of_a_pair_of_normal_numbers_is_kept_exactly() -> None:
    np.random.seed(3)
    np.random.randn()
    state = Rng.now()
    second = np.random.randn()
    state.restore()
    assert np.random.randn() == second


def test_a_generator_that_moved_by_one_number_is_seen_to_have_moved() -> None:
    Rng.now(quickly=True)
    np.random.rand()
    state = Rng.now(quickly=True)
    second = np.random.rand()
    state.restore()
    assert np.random.rand() == second


@pytest.mark.parametrize(
    "reseed", [np.random.seed, lambda seed: np.random.set_state(np.random.RandomState(seed).get_state())]
)
def test_a_generator_that_was_seeded_anew_is_seen_to_be_another(reseed: Callable[[int], Any]) -> None:
    Rng.now(quickly=True)
    reseed(11)
    state = Rng.now(quickly=True)
    first = np.random.rand()
    reseed(12)
    state.restore()
    assert np.random.rand() == first
