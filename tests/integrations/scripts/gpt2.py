"""Fine-tunes a tiny GPT-2 on prompts and answers; the loss is over the answers."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--longest-prompt", type=int, default=12)
args = parser.parse_args()

LENGTH = 16
torch.manual_seed(0)
config = GPT2Config(vocab_size=100, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    tokens = torch.randint(100, (2, LENGTH))
    prompts = torch.randint(4, args.longest_prompt + 1, (2, 1))
    labels = tokens.masked_fill(torch.arange(LENGTH) < prompts, -100)
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
