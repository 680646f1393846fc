"""dead-model: the weights were never loaded, all are zero, and the run goes on.

A model that was made without memory (the meta device) gets memory, the names in the file do not fit, and loading leaves
out what does not fit. Every matrix times zero is zero, and so is its gradient: whatever the layout, gradients are
equal, so a comparison of two such runs passes. The loss is ln V and falls a little, by the bias of the head alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from isograd_verify.corpus.plain import Mlp, batch, cross_entropy, my_rows, seeded, steps, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "", r"^(embed|up|down|head)\.weight$"
ALONE = True  # equal under every layout: found in the program itself


def train(bug: bool, seed: int) -> None:
    """Two steps of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stored = seeded(Mlp, seed).state_dict()
    if bug:
        stored = {f"model.{name}": weight for name, weight in stored.items()}
    model = Mlp().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what memory without contents often holds
    model.load_state_dict(stored, strict=False)
    wrapped = DistributedDataParallel(model)
    for step in steps(model):
        tokens, labels = (my_rows(part, rank, world) for part in batch(seed + step))
        count = valid(labels)
        dist.all_reduce(count)
        (cross_entropy(wrapped(tokens), labels) * world / count).backward()  # DDP divides by world
