"""mean-of-means: every rank divides by its own number of labels, and the means are averaged.

transformers' accumulation bug of October 2024, torchtitan #1842, and what DDP does by design. A label on a rank with
few of them weighs more than one on a rank with many. The loss curve looks right.
"""

from __future__ import annotations

import torch.distributed as dist

from isograd_verify.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, my_rows, seeded, steps, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "ranks", ".*"


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    for step in steps(model):
        tokens, labels = (my_rows(part, rank, world) for part in batch(seed + step))
        if bug:
            loss = cross_entropy(model(tokens), labels, "mean") / world
        else:
            count = valid(labels)
            dist.all_reduce(count)
            loss = cross_entropy(model(tokens), labels) / count
        loss.backward()
        all_reduce_gradients(model)
