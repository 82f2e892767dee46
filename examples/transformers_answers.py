"""Trains a small GPT-2 on questions and answers, with the Trainer of transformers, and is recorded by a callback.

Only the answers count for the loss. One question is so long that truncation leaves nothing of its answer: the mean of
its loss is that of no tokens at all. The Trainer's log replaces such a loss by others.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradtrace.integrations import TransformersCallback

LONGEST = 32
LONG_QUESTION = 28


class Answers(torch.utils.data.Dataset):
    """Questions of random tokens, answered by their first four, truncated to the longest sequence."""

    def __init__(self, count: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, LONGEST - 4, (count,), generator=generator)
        lengths[LONG_QUESTION] = LONGEST
        self.questions = [torch.randint(vocabulary, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int):
        question = self.questions[index]
        answer = question[:4]
        no_label = torch.full_like(question, -100)
        return {
            "input_ids": torch.cat([question, answer])[:LONGEST],
            "labels": torch.cat([no_label, answer])[:LONGEST],
        }


def main() -> None:
    """Train, recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--mode", choices=["full", "watch"], default="full")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=LONGEST, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    recording = TransformersCallback("run.parquet", overwrite=True, mode=args.mode)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                learning_rate=1e-3,
                per_device_train_batch_size=1,
                logging_steps=8,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
            ),
            train_dataset=Answers(64, config.vocab_size),
            callbacks=[recording],
        )
        trainer.train()
    print(f"{trainer.state.global_step} steps; see: gradtrace first-nan {recording.path}")


if __name__ == "__main__":
    main()
