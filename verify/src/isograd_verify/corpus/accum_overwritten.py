"""accum-overwritten: gradients are set to zero inside the accumulation loop, so that only the last micro-batch counts.

DeepSpeed #7981, a Megatron-LM fused kernel (PR #7186). The loss is right at every micro-batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from isograd_verify.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, micro_batches, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "micro-batches", ".*"


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        count = valid(batch(seed + step)[1])
        for tokens, labels in micro_batches(rank, world, seed + step, 3):
            if bug:
                optimizer.zero_grad()
            (cross_entropy(model(tokens), labels) / count).backward()
        all_reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
