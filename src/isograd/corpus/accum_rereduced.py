"""accum-rereduced: `.grad` is all-reduced inside the accumulation loop, so what is already a sum is summed again.

Megatron-LM #6660. With two ranks and three micro-batches the first counts four times, the second twice, the last once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from isograd.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, micro_batches, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "micro-batches", ".*"


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        count = valid(batch(seed + step)[1])
        for tokens, labels in micro_batches(rank, world, seed + step, 3):
            (cross_entropy(model(tokens), labels) / count).backward()
            if bug:
                all_reduce_gradients(model)
        if not bug:
            all_reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
