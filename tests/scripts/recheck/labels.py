"""A classifier with a DataLoader: its loss is 0/0 in the batch that has no labelled sample.

With --mended the loss is divided by at least one.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

UNLABELLED = -100


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if "--mended" in sys.argv:
        total = F.cross_entropy(logits, labels, ignore_index=UNLABELLED, reduction="sum")
        return total / (labels != UNLABELLED).sum().clamp_min(1)
    return F.cross_entropy(logits, labels, ignore_index=UNLABELLED)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
features, labels = torch.randn(24, 6), torch.randint(0, 3, (24,))
labels[16:20] = UNLABELLED
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for x, y in DataLoader(TensorDataset(features, labels), batch_size=4):
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
except Exception as error:
    print(f"caught {error}")
finally:
    print("finally")
