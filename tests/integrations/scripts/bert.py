"""Trains a small BERT classifier and evaluates it after each epoch."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

LENGTH = 64
torch.manual_seed(0)
config = BertConfig(
    vocab_size=1000,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=512,
    max_position_embeddings=LENGTH,
    num_labels=3,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)


def draw_batch():
    tokens = torch.randint(1, 1000, (8, LENGTH))
    lengths = torch.randint(4, LENGTH + 1, (8, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens[:, 0] % 3}


for _epoch in range(2):
    model.train()
    for _ in range(2):
        output = model(**draw_batch())
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        print("train", output.loss.item())
    model.eval()
    with torch.no_grad():
        print("evaluation", model(**draw_batch()).loss.item())
