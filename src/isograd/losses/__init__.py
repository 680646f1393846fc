"""Losses of fine-tuning and reinforcement, as terms: each is (value, weight), for `ig.Terms` or `engine.backward`."""

from isograd.losses.distillation import distil
from isograd.losses.policy import clip, entropy, group_advantages, kl, sequence_log_ratio, value
from isograd.losses.preference import dpo, ipo, kto, orpo, simpo
from isograd.losses.sequences import mean_of_sequences, sequence_means, sequence_sums
from isograd.losses.share import (
    Share,
    mean,
    numbered,
    of_length,
    of_prompts,
    of_sequences,
    of_tokens,
    tokens_of_prompts,
)

__all__ = [
    "Share", "clip", "distil", "dpo", "entropy", "group_advantages", "ipo", "kl", "kto", "mean", "mean_of_sequences",
    "numbered", "of_length", "of_prompts", "of_sequences", "of_tokens", "orpo", "sequence_log_ratio", "sequence_means",
    "sequence_sums", "simpo", "tokens_of_prompts", "value",
]  # fmt: skip
