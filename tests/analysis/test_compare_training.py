"""Real trainings side by side: the same again, with another learning rate, in another dtype, and watched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradtrace

STEPS = 4


class Net(nn.Module):
    """A bias before a batch norm has no gradient but for rounding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that records a training and returns its path, each only once."""
    directory = tmp_path_factory.mktemp("trainings")

    def train(name, *, lr=0.05, dtype=torch.float32, autocast=False, mode="full"):
        torch.manual_seed(0)
        model = Net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with gradtrace.trace(model, directory / f"{name}.parquet", overwrite=True, mode=mode, watch_first=1):
            for _ in range(STEPS):
                x, y = torch.randn(16, 6).to(dtype), torch.randn(16, 2)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = nn.functional.mse_loss(model(x).float(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return directory / f"{name}.parquet"

    return train


@pytest.fixture(scope="module")
def base(train):
    with gradtrace.open_run(train("base")) as run:
        yield run


def test_the_same_training_twice_is_bit_for_bit_the_same(base, train):
    found = base.diff(train("again"), rtol=0.0)
    assert not found.found
    assert found.compared > 100


def test_another_learning_rate_shows_in_the_first_update_and_not_before_it(base, train):
    found = base.diff(train("faster", lr=0.1))
    assert [(scalar.tensor, scalar.step, scalar.a, scalar.b) for scalar in found.scalars] == [("lr", 0, 0.05, 0.1)]
    assert (found.first.a.step, found.first.a.phase, found.first.a.tensor) == (0, "optimizer", "param")
    forward = [line for line in found.modules if line.first.a.phase == "forward"]
    assert forward
    assert all(line.first.a.step == 1 for line in forward)


@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"autocast": True}])
def test_bfloat16_trains_like_float32(base, train, how):
    found = base.diff(train("low", **how))
    assert (found.first, found.only_a, found.only_b) == (None, (), ())
    assert [(kinds.a, kinds.b) for kinds in found.dtypes] == [("float32", "bfloat16")]
    with gradtrace.open_run(train("low", **how)) as low:
        assert low.diff(train("fast_low", lr=0.5, **how)).first.a.tensor == "param"


def test_float64_against_float32_differs_in_no_more_than_rounding(base, train):
    found = base.diff(train("double", dtype=torch.float64))
    assert not found.found
    assert [(kinds.a, kinds.b) for kinds in found.dtypes] == [("float32", "float64")]


def test_a_watched_training_equals_a_full_one_in_what_both_have(base, train):
    found = base.diff(train("watched", mode="watch"))
    assert not found.found
    assert 0 < found.overlap.full < found.overlap.steps == STEPS
    assert found.compared < base.diff(base).compared
