"""Clipped policy gradient: a stale sample makes the ratio overflow, the minimum hides it."""

import torch
from torch import nn

torch.manual_seed(106)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.logits = nn.Linear(16, 4)

    def forward(self, state):
        return torch.log_softmax(self.logits(self.body(state)), dim=-1)


def clipped_objective(new, old, advantage, clip=0.2):
    ratio = torch.exp(new - old)
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

for step in range(6):
    state, advantage = torch.randn(8, 5), torch.rand(8) + 0.1
    action = torch.randint(0, 4, (8,))
    new = policy(state).gather(1, action[:, None]).squeeze(1)
    old = new.detach() + 0.05 * torch.randn(8)
    if step == 3:
        old[2] = -120.0  # sampled by a policy of another worker, long ago
    loss = clipped_objective(new, old, advantage)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
