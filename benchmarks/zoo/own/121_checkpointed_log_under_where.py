"""Mixture of experts in checkpointed blocks: a penalty on the log of those weights that are not zero."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(121)


class LogPenalty(nn.Module):
    def forward(self, weights):
        logs = torch.where(weights > 0, weights.log(), torch.zeros_like(weights))
        return logs.mean(dim=-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.router = nn.Linear(dim, 4)
        self.penalty = LogPenalty()
        self.experts = nn.Linear(dim, 4)
        self.back = nn.Linear(4, dim)

    def forward(self, x):
        weights = torch.softmax(self.router(x), dim=-1)
        return x + self.back(weights * self.experts(x)) + 0.01 * self.penalty(weights)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(6):
    x, y = torch.randn(6, 8), torch.randint(0, 2, (6,))
    if step == 3:
        with torch.no_grad():
            model.blocks[0].router.bias[2] = -300.0  # an expert is switched off for the rest of the run
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
