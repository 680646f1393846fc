"""norm-counts-replicas: squares are summed over the tensor-parallel ranks, also those of tensors that all ranks hold.

DeepSpeed #5411. The norm is too large by a known amount, and the same on all ranks: the step is clipped too much, and
more so with more ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.plain import batch, cross_entropy, seeded, steps, valid
from isograd_verify.corpus.sharded import ShardedMlp, split_gradients

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", ""  # all gradients are right; the norm is not
MOST = 0.05  # every step is clipped


def total_norm(model: ShardedMlp, bug: bool) -> Tensor:
    parts, wholes = split_gradients(model)
    counted = parts + wholes if bug or dist.get_rank() == 0 else parts
    square = torch.nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square)
    return square.sqrt()


def train(bug: bool, seed: int) -> None:
    model = seeded(ShardedMlp, seed)
    model.shard()
    for step in steps(model, lr=1.0):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MOST, total_norm(model, bug))
