"""A variational autoencoder: the KL term needs exp(logvar), the sample only exp(logvar / 2)."""

import torch
from torch import nn

torch.manual_seed(102)


class VAE(nn.Module):
    def __init__(self, features=6, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 16), nn.ReLU())
        self.mean = nn.Linear(16, latent)
        self.logvar = nn.Linear(16, latent)
        self.decoder = nn.Linear(latent, features)

    def forward(self, x):
        hidden = self.encoder(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        latent = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        return self.decoder(torch.tanh(latent)), mean, logvar


def elbo(x, reconstruction, mean, logvar):
    error = (reconstruction - x).abs().mean()
    variance = logvar.exp()
    kl = -0.5 * (1 + logvar - mean.pow(2) - variance).sum(dim=1).mean()
    return error + 1e-3 * kl


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(5):
    x = torch.rand(8, 6)
    if step == 3:
        x[5] = 700.0  # one row whose unit is not that of the others
    loss = elbo(x, *model(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
