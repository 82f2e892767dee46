"""Task-incremental classes: others are masked by -inf, which is fine until labels are smoothed."""

import torch
from torch import nn

torch.manual_seed(110)


class MaskedClassifier(nn.Module):
    def __init__(self, features=6, classes=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x, allowed):
        return self.head(self.body(x)).masked_fill(~allowed, float("-inf"))


model = MaskedClassifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
allowed = torch.arange(8) < 4

for step in range(6):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    smoothing = 0.1 if step >= 3 else 0.0  # regularise once the warm-up is over
    loss = nn.functional.cross_entropy(model(x, allowed), y, label_smoothing=smoothing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
