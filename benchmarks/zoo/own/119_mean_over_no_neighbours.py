"""Graph network with mean aggregation: a node without neighbours divides by zero."""

import torch
from torch import nn

torch.manual_seed(119)


class MeanConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.own = nn.Linear(dim, dim)
        self.others = nn.Linear(dim, dim)

    def forward(self, x, source, target):
        total = torch.zeros_like(x).index_add(0, target, x[source])
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        return self.own(x) + self.others(total / degree[:, None])


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, 12)
        self.convs = nn.ModuleList([MeanConv(12), MeanConv(12)])
        self.head = nn.Linear(12, 2)

    def forward(self, x, source, target):
        x = torch.relu(self.lift(x))
        for conv in self.convs:
            x = torch.relu(conv(x, source, target))
        return self.head(x)


model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ring = torch.arange(10)

for step in range(5):
    x = torch.randn(10, 5)
    source, target = ring, (ring + 1) % 10
    if step == 2:
        source, target = source[:-1], target[:-1]  # edge dropout hits the only edge into node 0
    loss = nn.functional.cross_entropy(model(x, source, target), torch.randint(0, 2, (10,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
