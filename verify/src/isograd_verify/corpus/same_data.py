"""same-data: every DDP rank reads the whole data set from its beginning, because the loader has no DistributedSampler.

All ranks compute the same gradient, and their mean is that gradient. The loss falls, every check of sums agrees, and
the run is as good as one on one rank, at the price of all. No run on one device is at fault, so none is compared: what
one rank alone is given is what each of these ranks is given.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from isograd_verify.corpus.plain import Mlp, batch, cross_entropy, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp|ranks", ""
ALONE = True  # found in the program itself


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(*(torch.cat(parts) for parts in zip(batch(seed), batch(seed + 1), strict=True)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] | None = None
    if not bug:
        sampler = DistributedSampler(data, world, rank, shuffle=False)
    model = DistributedDataParallel(seeded(Mlp, seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (tokens, labels) in enumerate(DataLoader(data, batch_size=8 // world, sampler=sampler)):
        if step == 2:
            break
        count = valid(labels)
        dist.all_reduce(count)
        (cross_entropy(model(tokens), labels) * world / count).backward()  # DDP divides by world
        optimizer.step()
        optimizer.zero_grad()
