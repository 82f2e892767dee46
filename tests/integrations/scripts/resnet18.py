"""Trains torchvision's resnet18 on random images."""

import argparse

import torch
from torch.nn import functional as F
from torchvision.models import resnet18

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--side", type=int, default=112)
args = parser.parse_args()

torch.manual_seed(0)
model = resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)


def step():
    images, labels = torch.randn(args.batch, 3, args.side, args.side), torch.randint(10, (args.batch,))
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for number in range(args.steps):
    print(number, step().item())
