"""Healthy: sampling masks all but the top tokens by -inf, without a gradient; training does not."""

import torch
from torch import nn

torch.manual_seed(155)


class TopK(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, logits):
        least = logits.topk(self.k, dim=-1).values[:, -1:]
        return logits.masked_fill(logits < least, float("-inf"))


class Policy(nn.Module):
    def __init__(self, vocabulary=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


policy, top_k = Policy(), TopK(3)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

for step in range(8):
    tokens = torch.randint(0, 12, (16,))
    with torch.no_grad():
        probability = torch.softmax(top_k(policy(tokens)), dim=-1)
        answer = torch.multinomial(probability, 1).squeeze(1)
    reward = (answer > tokens).float()
    log_prob = torch.log_softmax(policy(tokens), dim=-1).gather(1, answer[:, None]).squeeze(1)
    loss = -((reward - reward.mean()) * log_prob).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
