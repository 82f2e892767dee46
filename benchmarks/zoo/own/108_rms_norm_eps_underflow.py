"""Half-precision RMS norm: its epsilon is below what float16 can hold, padding is zero."""

import torch
from torch import nn

torch.manual_seed(108)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x * scale * self.weight


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.mix = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class Reader(nn.Module):
    def __init__(self, vocabulary=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)).mean(dim=1))


model = Reader().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(5):
    tokens = torch.randint(1, 20, (4, 6))
    if step == 3:
        tokens[2, 4:] = 0  # the first sentence that needs padding
    loss = nn.functional.cross_entropy(model(tokens).float(), torch.randint(0, 2, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
