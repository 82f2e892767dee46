"""Trains a small classifier in a loop of its own with Accelerate, two batches a step."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bad-rank", type=int, default=-1, help="the rank whose data are not finite in the third step")
args = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.features(x).sqrt() if x.min() < -90 else self.features(x))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(48, 8), torch.randint(3, (48,)))
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for number, (x, y) in enumerate(batches):
    if number == 4 and accelerator.process_index == args.bad_rank:
        x[0] = -100.0
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(accelerator.process_index, loss.item(), flush=True)
accelerator.end_training()
