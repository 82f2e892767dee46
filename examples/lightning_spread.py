"""Learns a curve and how far its readings spread around it, with Lightning, and is recorded by a callback.

The spread is a ReLU's output. Where the readings hardly spread it is exactly 0 after a while, and the likelihood
divides by it and takes its logarithm.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrace.integrations import LightningCallback


def make_readings(count: int, generator: torch.Generator) -> TensorDataset:
    """Return places [count, 1] and readings [count, 1]: the further to the right, the less they spread."""
    places = torch.rand(count, 1, generator=generator)
    noise = torch.randn(count, 1, generator=generator)
    return TensorDataset(places, torch.sin(4 * places) + 0.5 * (1 - places).square() * noise)


class Likelihood(nn.Module):
    """The mean negative logarithm of a normal distribution's density, without its constant."""

    def forward(self, mean, spread, readings):
        return (spread.log() + 0.5 * ((readings - mean) / spread).square()).mean()


class Regression(lightning.LightningModule):
    """The mean and the spread of the readings at a place."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean = nn.Linear(32, 1)
        self.spread = nn.Sequential(nn.Linear(32, 1), nn.ReLU())
        self.likelihood = Likelihood()
        nn.init.constant_(self.spread[0].bias, 1.0)

    def forward(self, places):
        features = self.body(places)
        return self.mean(features), self.spread(features)

    def training_step(self, batch, index):
        places, readings = batch
        return self.likelihood(*self(places), readings)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    """Train, recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--mode", choices=["full", "watch"], default="full")
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    readings = make_readings(2048, torch.Generator().manual_seed(0))
    recording = LightningCallback("run.parquet", overwrite=True, mode=args.mode)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recording],
    )
    trainer.fit(Regression(args.lr), DataLoader(readings, batch_size=64, shuffle=True))
    print(f"{trainer.global_step} steps; see: gradtrace first-nan {recording.path}")


if __name__ == "__main__":
    main()
