"""House prices in cents: without scaling the step is too long, every step overshoots further."""

import torch
from torch import nn

torch.manual_seed(112)

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)

for step in range(14):
    area = torch.rand(16, 3) * 100.0
    price = area.sum(dim=1, keepdim=True) * 1000.0
    loss = nn.functional.mse_loss(model(area), price)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
