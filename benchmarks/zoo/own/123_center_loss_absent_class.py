"""Center loss: the centres follow the means of the classes, also of a class that is not there."""

import torch
from torch import nn

torch.manual_seed(123)
CLASSES = 4


class CenterLoss(nn.Module):
    def __init__(self, dim, follow=0.5):
        super().__init__()
        self.register_buffer("centers", torch.zeros(CLASSES, dim))
        self.follow = follow

    def forward(self, features, labels):
        loss = (features - self.centers[labels]).pow(2).mean()
        with torch.no_grad():
            for label in range(CLASSES):
                mean = features[labels == label].mean(dim=0)
                self.centers[label] += self.follow * (mean - self.centers[label])
        return loss


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


model, center_loss = Encoder(), CenterLoss(16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(6):
    x, labels = torch.randn(12, 6), torch.arange(12) % CLASSES
    if step == 2:
        labels[labels == 3] = 0  # this batch has none of class 3
    features, logits = model(x)
    loss = nn.functional.cross_entropy(logits, labels) + 0.1 * center_loss(features, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
