"""Weight normalisation, and a pruning step that zeroes the weakest row of the direction."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(104)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = weight_norm(nn.Linear(6, 12))
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        return self.out(torch.relu(self.inp(x)))


def prune_weakest_row(layer):
    direction = layer.parametrizations.weight.original1
    with torch.no_grad():
        direction[direction.norm(dim=1).argmin()] = 0.0


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(6):
    if step == 3:
        prune_weakest_row(model.inp)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
