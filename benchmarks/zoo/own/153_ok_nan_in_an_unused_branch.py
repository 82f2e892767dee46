"""Healthy: a debugging branch of the forward pass yields NaN, nothing that is trained reads it."""

import torch
from torch import nn

torch.manual_seed(153)


class Signal(nn.Module):
    def forward(self, x):
        return (x.mean(dim=-1) / x.std(dim=-1)).log()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.snr = Signal()
        self.head = nn.Linear(12, 1)
        self.last_snr = None

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        self.last_snr = self.snr(hidden)  # for a plot; the mean may be negative
        return self.head(hidden).squeeze(-1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with torch.no_grad():
    model.body.bias.fill_(2.0)

for step in range(8):
    x = torch.randn(8, 6)
    if step == 3:
        with torch.no_grad():
            model.body.bias.fill_(0.0)
    loss = (model(x) - x[:, 0]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), model.last_snr.nanmean().item())
