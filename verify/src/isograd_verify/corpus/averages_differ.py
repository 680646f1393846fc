"""averages-differ: the weights are averaged with a decay that goes by tokens, and each rank counts its own.

The parameters are copies on all ranks and stay so. Their averages are evaluated and saved, rank 0's, and no rank's is
the one that the decay was meant to give. No gradient is wrong.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from isograd_verify.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, my_rows, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp|ranks", ".*"
HALF = 50  # tokens after which half of an average is new


def mixed(average: Tensor, weight: Tensor, updates: Tensor, tokens: float) -> Tensor:
    """The average after so many tokens."""
    old: float = 0.5 ** (tokens / HALF)
    return weight + (average - weight) * old


def train(bug: bool, seed: int) -> None:
    """Two steps of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    average = AveragedModel(model)
    average.update_parameters(model)  # the first one copies
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, labels = (my_rows(part, rank, world) for part in batch(seed + step))
        count = valid(labels)
        mine = float(count)
        dist.all_reduce(count)
        (cross_entropy(model(tokens), labels) / count).backward()
        all_reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        average.avg_fn = partial(mixed, tokens=mine * world if bug else float(count))
        average.update_parameters(model)
