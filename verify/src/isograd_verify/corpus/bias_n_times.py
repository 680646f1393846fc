"""bias-n-times: a row-parallel linear adds its bias on every rank, and then the outputs are summed over the ranks.

torchtitan #2106 and #4245. The model trains with the bias counted tp times; every activation behind it is off.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB, batch, cross_entropy, cut, seeded, steps, valid
from isograd_verify.corpus.sharded import INNER, copied, summed

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", ""  # the forward is wrong from `down` on, and with it all gradients


class RowLinear(nn.Linear):
    """Cut over its inputs; the bias is whole on every rank. The outputs are summed here."""

    bias_on_every_rank = False

    def shard(self) -> None:
        mine = self.weight.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()]
        self.weight = nn.Parameter(mine.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.bias_on_every_rank:
            return summed(F.linear(x, self.weight, self.bias))
        return summed(F.linear(x, self.weight)) + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = RowLinear(INNER, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def shard(self) -> None:
        self.up = cut(self.up, 0)
        self.down.shard()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits: Tensor = self.head(x + self.down(F.gelu(self.up(copied(self.norm(x))))))
        return logits


def train(bug: bool, seed: int) -> None:
    model = seeded(Model, seed)
    model.shard()
    model.down.bias_on_every_rank = bug
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
