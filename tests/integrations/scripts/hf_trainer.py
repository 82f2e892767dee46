"""Trains a small GPT-2 with the Trainer of transformers, two batches a step."""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(1000, (count, 64), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


torch.manual_seed(0)
config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            learning_rate=args.lr,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=args.bf16,
            seed=0,
        ),
        train_dataset=RandomTokens(48),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(entry["step"], entry["loss"], entry["grad_norm"])
print("weights", sum(p.double().sum().item() for p in model.parameters()))
