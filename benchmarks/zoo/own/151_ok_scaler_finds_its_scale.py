"""Healthy: the loss scale starts too high, the scaler skips some steps until it fits."""

import torch
from torch import nn

torch.manual_seed(151)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

for step in range(12):
    x = torch.randn(16, 8)
    y = x.sum(dim=1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = model(x)
    loss = (prediction.float() - y).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
