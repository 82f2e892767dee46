"""Trains a small classifier with Lightning's Trainer, validating after each epoch."""

import argparse

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        print("train", loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        print("validation", F.cross_entropy(self(x), y).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=args.lr)


lightning.seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=24))
