"""Fine-tunes a small GPT-2 on prompts and answers; the loss is over the answers."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--longest-prompt", type=int, default=48)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=2000)
args = parser.parse_args()

torch.manual_seed(0)
special = {"bos_token_id": 0, "eos_token_id": 0}
sizes = {"n_positions": args.length, "n_embd": args.width, "n_layer": args.layers, "n_head": max(2, args.width // 64)}
model = GPT2LMHeadModel(GPT2Config(vocab_size=args.vocabulary, **sizes, **special))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(0)


def step():
    tokens = torch.randint(args.vocabulary, (args.batch, args.length), generator=data)
    prompts = torch.randint(4, args.longest_prompt + 1, (args.batch, 1), generator=data)
    labels = tokens.masked_fill(torch.arange(args.length) < prompts, -100)
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


for number in range(args.steps):
    print(number, step().item())
