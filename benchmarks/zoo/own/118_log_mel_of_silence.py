"""Keyword spotting: the logarithm of a silent frame's energy, then a normalisation over time."""

import torch
from torch import nn

torch.manual_seed(118)


class LogEnergies(nn.Module):
    def __init__(self, bands=8, size=64):
        super().__init__()
        self.register_buffer("bank", torch.rand(size // 2 + 1, bands))

    def forward(self, frames):
        return torch.log(torch.fft.rfft(frames).abs().pow(2) @ self.bank)


class Normalise(nn.Module):
    def forward(self, features):
        return (features - features.mean(dim=1, keepdim=True)) / (features.std(dim=1, keepdim=True) + 1e-5)


class KeywordNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.energies = LogEnergies()
        self.normalise = Normalise()
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, 3)

    def forward(self, frames):
        features = self.normalise(self.energies(frames))
        return self.head(torch.relu(self.conv(features.transpose(1, 2))).mean(dim=-1))


model = KeywordNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(5):
    frames = torch.randn(4, 10, 64)
    if step == 2:
        frames[1, 7:] = 0.0  # the recording ends with digital silence
    loss = nn.functional.cross_entropy(model(frames), torch.randint(0, 3, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
