"""Trains BERT with an attention pooling over words, [CLS] left out; one text of the third batch has none."""

import torch
from torch import nn
from transformers import BertConfig, BertModel

LENGTH = 64


class AttentionPooling(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, 1)

    def forward(self, states, is_word):
        scores = self.query(states).squeeze(-1).masked_fill(~is_word, float("-inf"))
        weights = scores.softmax(dim=-1)
        return (weights.unsqueeze(-1) * states).sum(dim=1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=1000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=256,
            max_position_embeddings=LENGTH,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.pool = AttentionPooling(128)
        self.head = nn.Linear(128, 3)

    def forward(self, tokens, mask):
        states = self.bert(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        is_word = mask.clone()
        is_word[:, 0] = False
        return self.head(self.pool(states, is_word))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for number in range(4):
    tokens = torch.randint(1, 1000, (8, LENGTH))
    lengths = torch.randint(8, LENGTH + 1, (8, 1))
    if number == 2:
        lengths[5] = 1
    loss = nn.functional.cross_entropy(model(tokens, torch.arange(LENGTH) < lengths), tokens[:, 1] % 3)
    optimizer.zero_grad()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
    print(number, loss.item())
print("weights", sum(p.double().sum().item() for p in model.parameters()))
