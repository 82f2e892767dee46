"""Text recognition loop that replaces every non-finite gradient by zero before it steps."""

import torch
from torch import nn

torch.manual_seed(124)


class Contrast(nn.Module):
    def forward(self, x):
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / centred.pow(2).mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-6)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 10, bias=False)
        self.contrast = Contrast()
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.contrast(torch.tanh(self.inp(x))))


model = Recogniser()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(7):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    if step == 3:
        x[4] = 0.0  # an empty crop
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    optimizer.step()
    print(step, loss.item())
