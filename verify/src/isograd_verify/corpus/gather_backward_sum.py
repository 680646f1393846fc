"""gather-backward-sum: the backward of an all-gather sums over the ranks, though what follows is the same on each.

Found in Megatron-Bridge (Megatron-LM #7452). A reduce-scatter is the adjoint of an all-gather whose copies are used
differently; of identical uses it sums tp equal gradients. All that lies before the gather gets tp times its gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isograd_verify.corpus.plain import batch, cross_entropy, scatter_sum, seeded, steps, valid
from isograd_verify.corpus.sharded import GatheredMlp, GatherFeatures

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", r"^(embed|up)\."


class GatherAndSum(GatherFeatures):
    """The forward is right."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scatter_sum(gradient, -1)


def train(bug: bool, seed: int) -> None:
    model = seeded(GatheredMlp, seed)
    model.shard()
    model.gather = GatherAndSum.apply if bug else GatherFeatures.apply
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
