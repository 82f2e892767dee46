"""Trains torchvision's resnet18 on random images."""

import argparse

import torch
from torch.nn import functional as F
from torchvision.models import resnet18

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
model = resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
for step in range(args.steps):
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
