"""norm-dropout-rng: ranks that hold copies of the residual stream drop different elements of it.

BLOOM found its norms drifting apart over the tensor-parallel ranks: the random states differed where activations are
replicated. Each rank's layers work on an input of their own, and the sum of their outputs belongs to none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isograd_verify.corpus.plain import batch, cross_entropy, seeded, steps, valid
from isograd_verify.corpus.sharded import ShardedMlp, copied, summed

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", ""  # the forward is wrong from `dropout` on, and with it all gradients


class Model(ShardedMlp):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.25)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens))
        inner = F.gelu(self.up(copied(self.norm(x))))
        logits: Tensor = self.head(x + summed(self.down(inner)))
        return logits


def train(bug: bool, seed: int) -> None:
    model = seeded(Model, seed)
    model.shard()
    for step in steps(model):
        tokens, labels = batch(seed + step)
        torch.manual_seed(100 * seed + step + (50 * dist.get_rank() if bug else 0))
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
