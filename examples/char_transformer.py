"""Train a small character transformer on the sources of Python's own library."""

import argparse
import math
import os
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

PADDING = 0
UNKNOWN = 1
FIRST_CHARACTER = 2
VOCABULARY = FIRST_CHARACTER + 128  # ASCII


def read_library() -> list[str]:
    """Return the text of every module of the standard library, tests left out."""
    root = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    paths = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def encode(text: str) -> list[int]:
    """Return one token a character."""
    return [FIRST_CHARACTER + ord(c) if ord(c) < 128 else UNKNOWN for c in text]


def batches(texts: list[str], context: int, size: int, seed: int):
    """Yield (tokens, targets) of shape [size, context]: a window of every file, in a new order each epoch."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(range(len(texts)), len(texts))
        for first in range(0, len(order) - size + 1, size):
            rows = torch.full((size, context + 1), PADDING)
            for row, index in zip(rows, order[first : first + size], strict=True):
                text = texts[index]
                start = rng.randrange(max(1, len(text) - context))
                window = encode(text[start : start + context + 1])
                row[: len(window)] = torch.tensor(window, dtype=torch.long)
            yield rows[:, :-1], rows[:, 1:]


class Attention(nn.Module):
    """Causal self-attention that does not look at padding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.softmax = nn.Softmax(dim=-1)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = self.softmax(scores.masked_fill(~mask, float("-inf")))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, context: int, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril())

    def forward(self, tokens):
        mask = self.causal & (tokens != PADDING)[:, None, None, :]
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = CharTransformer(args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = batches(read_library(), args.context, args.batch_size, args.seed)
    for step in range(args.steps):
        tokens, targets = next(data)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
