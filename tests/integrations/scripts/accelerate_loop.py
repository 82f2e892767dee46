"""Trains a small classifier in a loop of its own with Accelerate, two batches a step."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bad-rank", type=int, default=-1, help="the rank with a row of zeros in its third step")
args = parser.parse_args()


class Normalize(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalize = Normalize()
        self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.features(self.normalize(x)))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(48, 8), torch.randint(3, (48,)))
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for number, (x, y) in enumerate(batches):
    if number == 4 and accelerator.process_index == args.bad_rank:
        x[0] = 0.0
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{accelerator.process_index} {loss.item()}\n", end="", flush=True)  # in one piece, whoever else prints
accelerator.end_training()
