"""Learn an embedding of noisy waveforms in which equal shapes lie close together."""

import argparse
import math

import torch
from torch import nn

SHAPES = 8


def make_waveforms(count: int, length: int, generator: torch.Generator):
    """Return waveforms [count, length] and their shapes [count]: harmonics of random phase, with noise."""
    shapes = torch.randint(SHAPES, (count,), generator=generator)
    time = torch.linspace(0, 2 * math.pi, length)
    phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
    first = torch.sin((1 + shapes % 4)[:, None] * time + phase)
    second = torch.sin(3 * (1 + shapes // 4)[:, None] * time + phase)
    noise = 0.3 * torch.randn(count, length, generator=generator)
    return first + 0.5 * second + noise, shapes


def draw_pairs(shapes, size: int, generator: torch.Generator):
    """Return indices of two waveforms a pair and whether they share a shape: half of the pairs do."""
    first = torch.randint(len(shapes), (size,), generator=generator)
    second = torch.randint(len(shapes), (size,), generator=generator)
    for row in range(0, size, 2):
        members = (shapes == shapes[first[row]]).nonzero().flatten()
        second[row] = members[torch.randint(len(members), (), generator=generator)]
    return first, second, shapes[first] == shapes[second]


class Encoder(nn.Module):
    """A waveform [batch, length] becomes a vector [batch, width]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2), nn.ReLU(), nn.Conv1d(16, 32, 5, stride=2), nn.ReLU()
        )
        self.projection = nn.Linear(32, width)

    def forward(self, waveform):
        return self.projection(self.convolutions(waveform[:, None]).mean(dim=-1))


class EuclideanDistance(nn.Module):
    """The distance between the vectors of two batches, row by row."""

    def forward(self, a, b):
        return (a - b).square().sum(dim=-1).sqrt()


class SiameseNetwork(nn.Module):
    """How far apart two waveforms lie in the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.distance = EuclideanDistance()

    def forward(self, first, second):
        return self.distance(self.encoder(first), self.encoder(second))


def contrastive_loss(distance, same, margin: float = 1.0):
    """Pull pairs of one shape together, push others apart up to the margin."""
    apart = torch.relu(margin - distance)
    return torch.where(same, distance.square(), apart.square()).mean()


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--waveforms", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    waveforms, shapes = make_waveforms(args.waveforms, 64, generator)
    model = SiameseNetwork()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        first, second, same = draw_pairs(shapes, args.batch_size, generator)
        loss = contrastive_loss(model(waveforms[first], waveforms[second]), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
