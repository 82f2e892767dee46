"""Command lines as they stand in the file: secrets masked, all else as typed."""

from __future__ import annotations

import pytest

from gradtrace.trace.secrets import masked


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("train.py --api-key abc123 --lr 3e-4", "train.py --api-key *** --lr 3e-4"),
        ("train.py --wandb_token=abc", "train.py --wandb_token=***"),
        ("train.py logger.api_key=abc seed=1", "train.py logger.api_key=*** seed=1"),
        ("train.py --PASSWORD hunter2", "train.py --PASSWORD ***"),
        ("train.py --secret --lr 0.1", "train.py --secret --lr 0.1"),
        ("train.py --key 3", "train.py --key 3"),
        ("train.py --tokenizer gpt2 --max-tokens 512", "train.py --tokenizer gpt2 --max-tokens 512"),
        ("train.py push hf_abcdefghijkl", "train.py push ***"),
        ("train.py --store s3://me:pass@host/bucket", "train.py --store s3://me:***@host/bucket"),
        ("train.py https://example.org/a?b=c", "train.py https://example.org/a?b=c"),
    ],
)
def test_values_that_look_like_secrets_are_masked_and_no_others(typed, kept):
    assert masked(typed.split()) == kept.split()
