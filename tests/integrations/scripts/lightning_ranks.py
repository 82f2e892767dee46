"""Trains with Lightning in two processes that it starts itself, twice, recorded by a callback; rank 1 has a bad row."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrace.integrations import LightningCallback


class Normalize(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.normalize = Normalize()
        self.head = nn.Linear(4, 1)

    def training_step(self, batch, index):
        (x,) = batch
        if (self.global_rank, index) == (1, 1):
            x = x * torch.tensor([[0.0], [1.0], [1.0], [1.0]])
        return self.head(self.normalize(x)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.set_num_threads(1)
recording = LightningCallback("run.parquet", overwrite=True)
for _ in range(2):
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recording],
    )
    trainer.fit(Network(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4))
print(f"rank {trainer.global_rank}: {trainer.global_step}\n", end="", flush=True)
