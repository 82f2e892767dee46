"""Rotation of unit vectors, trained on the angle between prediction and truth."""

import torch
from torch import nn

torch.manual_seed(101)


class AngleBetween(nn.Module):
    def forward(self, a, b):
        return torch.acos((a * b).sum(dim=-1))


class Rotator(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(2, 2, bias=False)
        self.angle = AngleBetween()

    def forward(self, x, target):
        return self.angle(self.turn(x), target)


model = Rotator()
with torch.no_grad():
    model.turn.weight.copy_(torch.eye(2) * 0.9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(6):
    x = nn.functional.normalize(torch.randn(8, 2), dim=-1)
    target = nn.functional.normalize(x + 0.3 * torch.randn(8, 2), dim=-1)
    if step == 3:  # the calibration batch: nothing was turned, and the model says so exactly
        with torch.no_grad():
            model.turn.weight.copy_(torch.eye(2))
        x[0] = target[0] = torch.tensor([1.0, 0.0])
    else:
        target = 0.9 * target
    loss = model(x, target).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
