"""Minimax GAN with logarithms written by hand: a discriminator that is entirely sure."""

import torch
from torch import nn

torch.manual_seed(120)

generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
discriminator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.01)
optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.01)

for step in range(6):
    real = torch.randn(8, 4) + 2.0
    if step == 3:
        real[5] *= 4000.0  # an image that was not rescaled to 0..1
        with torch.no_grad():
            discriminator[2].weight.abs_().neg_()
    fake = generator(torch.randn(8, 3))
    loss_d = -(discriminator(real).log() + (1 - discriminator(fake.detach())).log()).mean()
    optimizer_d.zero_grad()
    loss_d.backward()
    optimizer_d.step()
    loss_g = -discriminator(fake).log().mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    print(step, loss_d.item(), loss_g.item())
