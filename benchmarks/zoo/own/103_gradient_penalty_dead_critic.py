"""Wasserstein critic with a gradient penalty: the norm of a gradient that is exactly zero."""

import torch
from torch import nn

torch.manual_seed(103)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, x):
        return self.score(torch.relu(self.hidden(x)))


def gradient_penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    length = slope.pow(2).sum(dim=1).sqrt()
    return (length - 1).pow(2).mean()


critic = Critic()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)

for step in range(5):
    real, fake = torch.rand(6, 4), torch.rand(6, 4)
    if step == 2:  # a far-off pair, for which every hidden unit is off
        with torch.no_grad():
            critic.hidden.weight.clamp_(min=0.01)
        real[3] = fake[3] = -50.0
    loss = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(critic, real, fake)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
