"""Trains a classifier with an energy computed in half precision with Lightning; one sample is an outlier."""

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Energy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scaled = (self.gain * x).half()
        energy = scaled.square()
        return energy.float()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.energy = Energy(64)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(256, 3))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(self.energy(x)), y)
        print("train", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
x, y = torch.randn(64, 64), torch.randint(3, (64,))
x[37, 11] = 300.0  # its square is more than float16 holds: 65504
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(TensorDataset(x, y), batch_size=16))
