"""A training that shares its model with a spawned process, which imports this file again and trains, too."""

from __future__ import annotations

import torch
import torch.multiprocessing as multiprocessing
from torch import nn


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(model: nn.Module, answers: multiprocessing.Queue) -> None:
    torch.manual_seed(1)
    answers.put((train(model, 3), nn.Module.__call__.__module__))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).share_memory()
    print(train(model, 2))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=work, args=(model, answers))
    process.start()
    print(answers.get())
    process.join()
    print(process.exitcode, train(model, 2))
