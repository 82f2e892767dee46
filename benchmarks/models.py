"""The fixed models that costs are measured on, each with a batch, an optimizer and a loss.

Here stand the models and nothing of how they are measured. The learning rate is so small that a training stays what
it is at its start, however many steps are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Training:
    """A model in training: ``loss`` runs its forward pass on a fixed batch and returns the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]

    def step(self) -> float:
        """Train for one step and return the loss."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Block(nn.Module):
    """A layer of a GPT: attention and a feed-forward net, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Return the next states; both are [batch, length, width]."""
        batch, length, width = states.shape
        qkv = self.qkv(self.norm1(states)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return states + self.down(self.activation(self.up(self.norm2(states))))


class GPT(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int, heads: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] of tokens [batch, length]."""
        states = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.head(self.norm(states))
        return logits


class Recurrent(nn.Module):
    """Two layers of LSTM and a head."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return [batch, length, outputs] of sequences [batch, length, width]."""
        result: Tensor = self.head(self.lstm(sequences)[0])
        return result


def gpt(layers: int, width: int, batch: int, length: int, vocabulary: int = 4096) -> Training:
    """Return a GPT in training with AdamW on random tokens."""
    model = GPT(layers, width, length, vocabulary)
    tokens, labels = torch.randint(vocabulary, (2, batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return Training(model, optimizer, lambda: F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))


def cnn() -> Training:
    """Return the small CNN, 3 -> 16 -> 32 channels, on 64 images of 32 x 32."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Training(model, _sgd(model), lambda: F.cross_entropy(model(images), labels))


def resnet50() -> Training:
    """Return torchvision's ResNet50 on 8 images of 224 x 224."""
    import torchvision

    model: nn.Module = torchvision.models.resnet50()
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    return Training(model, _sgd(model), lambda: F.cross_entropy(model(images), labels))


def mlp(depth: int = 50, width: int = 256, batch: int = 64) -> Training:
    """Return the deep MLP: operations so small that what is done at each boundary is most of the cost."""
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))
    inputs, targets = torch.randn(2, batch, width)
    return Training(model, _sgd(model), lambda: F.mse_loss(model(inputs), targets))


def lstm() -> Training:
    """Return an LSTM of two layers of 256 on 32 sequences of 64, trained with Adam."""
    model = Recurrent(256, 64)
    inputs, targets = torch.randn(32, 64, 256), torch.randn(32, 64, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    return Training(model, optimizer, lambda: F.mse_loss(model(inputs), targets))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


MODELS: dict[str, Callable[[], Training]] = {
    "cnn": cnn,
    "resnet50": resnet50,
    "gpt256": lambda: gpt(6, 256, batch=8, length=128),
    "gpt512": lambda: gpt(6, 512, batch=4, length=256),
    "mlp": mlp,
    "lstm": lstm,
}

TITLES = {
    "cnn": "small CNN, 3 -> 16 -> 32 channels, 64 x 3 x 32 x 32",
    "resnet50": "ResNet50, 8 x 3 x 224 x 224",
    "gpt256": "GPT, 6 layers of 256, 8 x 128 tokens of 4096",
    "gpt512": "GPT, 6 layers of 512, 4 x 256 tokens of 4096",
    "mlp": "MLP, 50 x (Linear 256 + ReLU), batch 64",
    "lstm": "LSTM, 2 layers of 256, 32 x 64",
}


def make(name: str) -> Training:
    """Return the model of that name in training, always the same weights and batch.

    Raises:
        ModuleNotFoundError: it needs a package that is not installed.
    """
    torch.manual_seed(0)
    return MODELS[name]()
