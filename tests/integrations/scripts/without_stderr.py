"""A training that closes its stderr in the midst, then the descriptor below it, and meets a NaN after each."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps: int, *, scale: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(scale * torch.randn(6, 4)).square().mean()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        print(loss.item())


train(2)
sys.stderr.close()
train(1, scale=float("nan"))
train(2)
os.close(2)
own = os.open("own.txt", os.O_WRONLY | os.O_CREAT)
train(1, scale=float("inf"))
train(2)
print(own, os.fstat(own).st_size, [parameter.sum().item() for parameter in model.parameters()])
