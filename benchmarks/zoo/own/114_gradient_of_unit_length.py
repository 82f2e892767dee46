"""Every layer's gradient is scaled to length one before the step, also one that is zero."""

import torch
from torch import nn

torch.manual_seed(114)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.main = nn.Linear(16, 1)
        self.extra = nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.main(hidden).squeeze(-1), self.extra(hidden).squeeze(-1)


def normalise_gradients(model):
    for parameter in model.parameters():
        parameter.grad /= parameter.grad.norm()


model = TwoHeads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(6):
    x = torch.randn(8, 5)
    main, extra = model(x)
    known = torch.ones(8)
    if step == 3:
        known[:] = 0.0  # nobody annotated the extra task in this batch
    loss = (main - x.sum(dim=1)).abs().mean() + (known * (extra - 1).abs()).mean()
    optimizer.zero_grad()
    loss.backward()
    normalise_gradients(model)
    optimizer.step()
    print(step, loss.item())
