"""Gradient accumulation over micro batches, each divided by its own number of answer tokens."""

import torch
from torch import nn

torch.manual_seed(113)
ACCUMULATE = 2


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=24, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


model = LanguageModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(10):
    tokens, labels = torch.randint(0, 24, (3, 6)), torch.randint(0, 24, (3, 6))
    labels[:, :2] = -100
    if step == 5:
        labels[:] = -100  # the prompt alone filled the context, the answers were cut off
    logits = model(tokens).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    loss = total / (labels != -100).sum() / ACCUMULATE
    loss.backward()
    if step % ACCUMULATE == ACCUMULATE - 1:
        optimizer.step()
        optimizer.zero_grad()
    print(step, loss.item())
