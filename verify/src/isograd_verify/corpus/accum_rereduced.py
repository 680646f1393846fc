"""accum-rereduced: `.grad` is all-reduced inside the accumulation loop, so what is already a sum is summed again.

Megatron-LM #6660. With two ranks and three micro-batches the first counts four times, the second twice, the last once.
"""

from __future__ import annotations

import torch.distributed as dist

from isograd_verify.corpus.plain import (
    Mlp,
    all_reduce_gradients,
    batch,
    cross_entropy,
    micro_batches,
    seeded,
    steps,
    valid,
)

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "micro-batches", ".*"


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    for step in steps(model):
        count = valid(batch(seed + step)[1])
        for tokens, labels in micro_batches(rank, world, seed + step, 3):
            (cross_entropy(model(tokens), labels) / count).backward()
            if bug:
                all_reduce_gradients(model)
        if not bug:
            all_reduce_gradients(model)
