"""ulysses-permute: after the second all-to-all the pieces are reshaped where they should first be transposed.

DeepSpeed #5664: 0.14.2 to 0.14.4 corrupt half of the output and more, by layout and batch size. The shape is right, the
exchange there and back is the identity when the mistake is made twice, and the loss falls.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.attention import HEADS, SIZE, ToSequence, UlyssesModel
from isograd_verify.corpus.plain import BATCH, all_reduce_gradients, batch, cross_entropy, seeded, steps, valid

WORLD, LAYOUT = 2, "cp2 ulysses"
AXIS, TENSORS = "cp", ""  # the forward is wrong from `to_sequence` on, and with it all gradients


class ReshapedToSequence(ToSequence):
    def merge(self, received: Tensor) -> Tensor:
        return received.reshape(BATCH, -1, HEADS, SIZE)  # from [rank, batch, part, heads / cp, size]


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(UlyssesModel, seed)
    if bug:
        model.to_sequence = ReshapedToSequence()
    for step in steps(model):
        whole = batch(seed + step)
        tokens, labels = (part.chunk(world, 1)[rank] for part in whole)
        (cross_entropy(model(tokens), labels) / valid(whole[1])).backward()
        all_reduce_gradients(model)
