"""nosync-missing: the forward of the last micro-batch runs under no_sync, too, so nothing is ever reduced.

DeepSpeed #1902, and a line of DDP's documentation that is easy to miss: the forward decides whether its backward
reduces. The ranks train on their own data alone, and drift apart.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from isograd_verify.corpus.plain import Mlp, batch, cross_entropy, micro_batches, seeded, steps, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp", ".*"


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(seeded(Mlp, seed))
    for step in steps(model):
        count = valid(batch(seed + step)[1])
        for i, (tokens, labels) in enumerate(micro_batches(rank, world, seed + step, 3)):
            last = i == 2
            with nullcontext() if last and not bug else model.no_sync():
                logits = model(tokens)
            (cross_entropy(logits, labels) / count * world).backward()  # DDP divides by the world
