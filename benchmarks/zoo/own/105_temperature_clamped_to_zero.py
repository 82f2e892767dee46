"""Contrastive pairs with a learned temperature that is kept non-negative, but not positive."""

import torch
from torch import nn

torch.manual_seed(105)


class Sharpen(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, similarity):
        return similarity / self.temperature


class PairModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(6, 8)
        self.sharpen = Sharpen()

    def forward(self, a, b):
        a = nn.functional.normalize(self.tower(a), dim=-1)
        b = nn.functional.normalize(self.tower(b), dim=-1)
        return self.sharpen(a @ b.T)


model = PairModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(8):
    a = torch.randn(8, 6)
    loss = nn.functional.cross_entropy(model(a, a + 0.1 * torch.randn(8, 6)), torch.arange(8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.sharpen.temperature.clamp_(min=0.0)
    print(step, loss.item(), model.sharpen.temperature.item())
