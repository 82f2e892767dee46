"""Half-precision training with a fixed loss scale: a hard batch overflows on the way back."""

import torch
from torch import nn

torch.manual_seed(122)
SCALE = 1024.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 32)
        self.gain = nn.Linear(32, 32, bias=False)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.gain(torch.relu(self.inp(x)))).squeeze(-1)


model = Net().half()
with torch.no_grad():
    model.out.weight.fill_(0.25)
    model.gain.weight.mul_(0.05)
master = [parameter.detach().float() for parameter in model.parameters()]
optimizer = torch.optim.SGD(master, lr=1e-3)

for step in range(6):
    x = torch.randn(4, 8)
    target = x.sum(dim=1)
    if step == 3:
        target[2] = 4000.0  # an outlier
    error = model(x.half()).float() - target
    loss = error.pow(2).mean()
    model.zero_grad()
    (loss * SCALE).backward()
    for copy, parameter in zip(master, model.parameters(), strict=True):
        copy.grad = parameter.grad.float() / SCALE
    optimizer.step()
    with torch.no_grad():
        for copy, parameter in zip(master, model.parameters(), strict=True):
            parameter.copy_(copy)
    print(step, loss.item())
