"""Sequence tagging with a constrained CRF: one annotated sentence breaks the tag scheme."""

import torch
from torch import nn

torch.manual_seed(111)
OUTSIDE, BEGIN, INSIDE = 0, 1, 2


class LinearChain(nn.Module):
    def __init__(self, tags=3):
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(tags, tags))
        self.register_buffer("allowed", torch.ones(tags, tags, dtype=torch.bool))
        self.allowed[OUTSIDE, INSIDE] = False

    def forward(self, emissions, tags):
        transitions = self.transitions.masked_fill(~self.allowed, float("-inf"))
        alpha, gold = emissions[:, 0], emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + transitions, dim=1) + emissions[:, t]
            gold = gold + transitions[tags[:, t - 1], tags[:, t]]
            gold = gold + emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
        return (torch.logsumexp(alpha, dim=1) - gold).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.emit = nn.Linear(8, 3)
        self.crf = LinearChain()

    def forward(self, tokens, tags):
        return self.crf(self.emit(self.embed(tokens)), tags)


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(6):
    tokens = torch.randint(0, 30, (4, 5))
    tags = torch.tensor([[OUTSIDE, BEGIN, INSIDE, OUTSIDE, OUTSIDE]] * 4)
    if step == 3:
        tags[1, 3:] = torch.tensor([OUTSIDE, INSIDE])  # an entity that was never begun
    loss = model(tokens, tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
