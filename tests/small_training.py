"""A training of the benchmarks' kind that takes no time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import Training


def small_training(seed: int = 0) -> Training:
    """Return the training of three layers on five rows, always the same."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs, targets = torch.randn(5, 3), torch.randn(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, lambda: F.mse_loss(model(inputs), targets))
