"""A GPT trained by several processes. On rank 1 one sequence of one batch is nothing but padding: its attention is 0/0.

Knows nothing of gradtrace. ``--wrap`` says how the ranks share the work.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 16


class Attention(nn.Module):
    """Causal attention over the tokens that are kept."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).exp() * mask
        weights = weights / weights.sum(-1, keepdim=True)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a feed-forward part, each with a residual around it."""

    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, keep):
        mask = keep[:, None, None, :] * torch.ones(LENGTH, LENGTH).tril()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def wrapped(model, how):
    """Return the model as the ranks train it together."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return model
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return model


def main():
    """Train for a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=("none", "ddp", "fsdp1", "fsdp2", "tensor"), default="ddp")
    parser.add_argument("--bad-step", type=int, default=2)
    parser.add_argument("--die-at", type=int, default=-1, help="rank 1 kills itself at this step of the first attempt")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = GPT()
    if args.wrap != "none":  # else each rank is for itself
        dist.init_process_group("gloo")
        model = wrapped(model, args.wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(rank)
    for step in range(4):
        if (rank, attempt, step) == (1, 0, args.die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=draw)
        keep = torch.ones(4, LENGTH)
        if (rank, step) == (1, args.bad_step):
            keep[2] = 0
        logits = model(tokens[:, :-1], keep)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # In one piece: the ranks share their output.
        os.write(1, f"rank {rank} step {step} loss {loss.item():.6f}\n".encode())
    if args.wrap != "none":
        dist.destroy_process_group()


main()
