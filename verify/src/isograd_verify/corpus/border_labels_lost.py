"""border-labels-lost: labels are shifted by one after the sequence was cut, inside each rank's part of it.

A model that shifts its own labels, as those of transformers do, is given its shard: the last token of every shard has
no next one there, and its target is lost. No shape tells, the loss is a mean of right losses, and it falls as before.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isograd_verify.corpus.attention import UlyssesModel
from isograd_verify.corpus.plain import all_reduce_gradients, batch, cross_entropy, seeded, steps, valid

WORLD, LAYOUT = 2, "cp2 ulysses"
AXIS, TENSORS = "cp", ""  # the loss is another one, and with it all gradients


def shifted(ids: Tensor) -> Tensor:
    """What each token should predict, the next one; the last has none."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(UlyssesModel, seed)
    for step in steps(model):
        tokens, ids = batch(seed + step)
        tokens = tokens.chunk(world, 1)[rank]
        labels = shifted(ids.chunk(world, 1)[rank]) if bug else shifted(ids).chunk(world, 1)[rank]
        count = valid(labels)
        dist.all_reduce(count)
        (cross_entropy(model(tokens), labels) / count).backward()
        all_reduce_gradients(model)
