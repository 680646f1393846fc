"""clip-per-rank: each tensor-parallel rank clips by the norm of its own part.

BLOOM ran so for 17,000 iterations; DeepSpeed #8469 and torchtitan #596 are of the kind. Replicated tensors are rightly
counted on one rank only, but the squares are never summed over the ranks: each scales by a factor of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from isograd_verify.corpus.plain import batch, cross_entropy, seeded, steps, valid
from isograd_verify.corpus.sharded import ShardedMlp, split_gradients

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", ".*"
MOST = 0.05  # every step is clipped


def clip(model: ShardedMlp, bug: bool) -> None:
    parts, wholes = split_gradients(model)
    counted = parts + wholes if dist.get_rank() == 0 else parts
    square = torch.stack([gradient.square().sum() for gradient in counted]).sum()
    if not bug:
        dist.all_reduce(square)
    for gradient in parts + wholes:
        gradient.mul_((MOST / square.sqrt()).clamp(max=1))


def train(bug: bool, seed: int) -> None:
    model = seeded(ShardedMlp, seed)
    model.shard()
    for step in steps(model, lr=1.0):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        clip(model, bug)
