"""Behaviour cloning with a tanh-squashed Gaussian: an action stored at the very limit."""

import torch
from torch import nn

torch.manual_seed(109)


class GaussianActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.mean = nn.Linear(16, 2)
        self.log_std = nn.Linear(16, 2)

    def forward(self, state):
        hidden = self.body(state)
        return self.mean(hidden), self.log_std(hidden).clamp(-5, 2).exp()


def squashed_log_prob(action, mean, std):
    before = torch.atanh(action)
    normal = -0.5 * ((before - mean) / std).pow(2) - std.log()
    return (normal - torch.log(1 - action.pow(2) + 1e-6)).sum(dim=-1)


actor = GaussianActor()
optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)

for step in range(5):
    state, action = torch.randn(8, 4), torch.tanh(torch.randn(8, 2))
    if step == 2:
        action[6, 1] = 1.0  # the expert's controller clips
    loss = -squashed_log_prob(action, *actor(state)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
