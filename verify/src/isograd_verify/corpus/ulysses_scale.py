"""ulysses-scale: gradients over the sequence-parallel ranks are averaged where they should be summed.

DeepSpeed #5248; in 0.19.8 they come out as 1, sp or 1 / sp times the right ones, by ZeRO stage and one flag. Here the
loss is already divided by the labels of the whole step, so every rank's gradient is a summand.
"""

from __future__ import annotations

import torch.distributed as dist

from isograd_verify.corpus.attention import UlyssesModel
from isograd_verify.corpus.plain import all_reduce_gradients, batch, cross_entropy, seeded, steps, valid

WORLD, LAYOUT = 2, "cp2 ulysses"
AXIS, TENSORS = "cp", ".*"


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(UlyssesModel, seed)
    for step in steps(model):
        whole = batch(seed + step)
        tokens, labels = (part.chunk(world, 1)[rank] for part in whole)
        (cross_entropy(model(tokens), labels) / valid(whole[1])).backward()
        all_reduce_gradients(model)
        if bug:
            for parameter in model.parameters():
                parameter.grad.div_(world)
