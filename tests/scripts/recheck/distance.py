"""Pairs from a DataLoader, one of them equal: the slope of the square root is infinite there.

With --mended there is an epsilon under the root.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPSILON = 1e-12 if "--mended" in sys.argv else 0.0


class Distance(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return ((left - right).square().sum(-1) + EPSILON).sqrt()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 4)
        self.distance = Distance()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.distance(self.encoder(left), self.encoder(right))


class Pairs(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.left, self.right = torch.randn(12, 5), torch.randn(12, 5)
        self.right[7] = self.left[7]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"left": self.left[index], "right": self.right[index], "target": torch.ones(())}


torch.manual_seed(1)
siamese = Siamese()
optimizer = torch.optim.Adam(siamese.parameters(), lr=0.01)
for pair in DataLoader(Pairs(), batch_size=3):
    distance = siamese(pair["left"], pair["right"])
    loss = (distance - pair["target"]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
