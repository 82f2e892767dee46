"""Trains resnet18 on key points; one image has none that is visible."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = resnet18(num_classes=8)

    def forward(self, images, points, visible):
        errors = (self.trunk(images) - points).square() * visible
        return errors.sum(dim=1) / visible.sum(dim=1)


torch.manual_seed(0)
images, points = torch.randn(32, 3, 96, 96), torch.rand(32, 8)
visible = (torch.rand(32, 8) < 0.7).float()
visible[:, 0] = 1
visible[19] = 0
loader = DataLoader(TensorDataset(images, points, visible), batch_size=8)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for number, batch in enumerate(loader):
    loss = model(*batch).mean()
    optimizer.zero_grad()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
    print(number, loss.item())
print("weights", sum(p.double().sum().item() for p in model.parameters()))
print("statistics", sum(b.double().nan_to_num(nan=1.0).sum().item() for b in model.buffers()))
