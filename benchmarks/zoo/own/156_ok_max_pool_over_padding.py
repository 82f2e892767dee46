"""Healthy: padding is filled with -inf so that it never wins the maximum over time."""

import torch
from torch import nn

torch.manual_seed(156)


class FillPadding(nn.Module):
    def forward(self, x, length):
        padding = torch.arange(x.shape[1]) >= length[:, None]
        return x.masked_fill(padding[:, :, None], float("-inf"))


class MaxOverTime(nn.Module):
    def forward(self, x):
        return x.amax(dim=1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 10)
        self.fill = FillPadding()
        self.pool = MaxOverTime()
        self.head = nn.Linear(10, 2)

    def forward(self, tokens, length):
        return self.head(self.pool(self.fill(self.embed(tokens), length)))


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(6):
    tokens, length = torch.randint(0, 20, (6, 7)), torch.full((6,), 7)
    if step == 3:  # the first batch with a short sentence
        length[2] = 4
    loss = nn.functional.cross_entropy(model(tokens, length), torch.randint(0, 2, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
