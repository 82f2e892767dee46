"""Mixed precision: the scaler skips the step of an overflow, the running statistics keep it."""

import torch
from torch import nn

torch.manual_seed(116)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.bn = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.bn(self.inp(x).float())))


model = Net()
nn.init.normal_(model.inp.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

for step in range(6):
    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
    if step == 2:
        x[0] *= 25000.0  # a sensor glitch
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())

model.eval()
with torch.no_grad():
    print("validation", model(torch.randn(4, 8)).sum().item())
