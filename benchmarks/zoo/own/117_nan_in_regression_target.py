"""Biomass regression: one plot of the batch has no measurement."""

import torch
from torch import nn

torch.manual_seed(117)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


model = Regressor()
criterion = nn.SmoothL1Loss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(5):
    x = torch.rand(8, 7)
    biomass = x.sum(dim=1) * 10.0
    if step == 2:
        biomass[3] = float("nan")  # an empty cell in the table
    loss = criterion(model(x), biomass)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
