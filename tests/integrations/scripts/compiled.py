"""Trains a compiled model: code is generated for it. Prints each loss and the weights' sum as they are in memory."""

import sys
import warnings

warnings.filterwarnings("ignore", ".*torch.jit.*")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def main() -> None:
    torch.manual_seed(0)
    model = Net()
    way, bad_step = sys.argv[1], int(sys.argv[2])
    if way == "method":
        model.compile()
    if way == "part":
        model.blocks = torch.compile(model.blocks)
    net = torch.compile(model) if way == "whole" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        batch = torch.randn(6, 4)
        if step == bad_step:
            batch[0, 0] = torch.inf
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    print(sum(parameter.sum().item() for parameter in model.parameters()).hex())


if __name__ == "__main__":
    main()
