"""Self-distillation: the teacher follows the student by a schedule that is shorter than the run."""

import copy

import torch
from torch import nn

torch.manual_seed(115)

student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
TOTAL = 4


def momentum(step):
    progress = torch.tensor(step / TOTAL)
    return 1 - 0.04 * (1 - progress).pow(0.9)


for step in range(9):
    x = torch.randn(8, 6)
    with torch.no_grad():
        target = torch.softmax(teacher(x) / 0.5, dim=-1)
    loss = nn.functional.cross_entropy(student(x + 0.1 * torch.randn(8, 6)), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    keep = momentum(step)
    with torch.no_grad():
        for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.mul_(keep).add_((1 - keep) * theirs)
    print(step, loss.item())
