"""cut-graph: dist.all_gather is called in forward on a tensor that needs a gradient, and has no backward.

pytorch #152127; dist.all_to_all_single does the same. Nothing is raised: what the list receives are constants, so all
layers before the gather stay as they were initialised, and the loss still falls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.plain import batch, cross_entropy, seeded, steps, valid
from isograd_verify.corpus.sharded import GatheredMlp, GatherFeatures

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", r"^(embed|up)\."


def gather_without_backward(x: Tensor) -> Tensor:
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.contiguous())
    return torch.cat(pieces, -1)


def train(bug: bool, seed: int) -> None:
    model = seeded(GatheredMlp, seed)
    model.shard()
    model.gather = gather_without_backward if bug else GatherFeatures.apply
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
