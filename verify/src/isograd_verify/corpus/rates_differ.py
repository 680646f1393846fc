"""rates-differ: the learning rate is warmed up by tokens, and each rank counts its own.

Gradients are summed and equal on all ranks, and each rank makes another step of them: copies drift apart from the first
step on. The same happens with a scheduler that looks at this rank's loss, and with one that only rank 0 steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from isograd_verify.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, my_rows, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp|ranks", ".*"
WARM = 60  # tokens


def train(bug: bool, seed: int) -> None:
    """Two steps of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for step in range(2):
        tokens, labels = (my_rows(part, rank, world) for part in batch(seed + step))
        count = valid(labels)
        mine = int(count)
        dist.all_reduce(count)
        (cross_entropy(model(tokens), labels) / count).backward()
        all_reduce_gradients(model)
        seen += mine * world if bug else int(count)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, seen / WARM)
        optimizer.step()
        optimizer.zero_grad()
