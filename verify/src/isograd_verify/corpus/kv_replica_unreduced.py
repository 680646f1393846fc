"""kv-replica-unreduced: there are more tensor-parallel ranks than key/value heads, so ranks hold copies of one head.

Grouped-query attention beyond the number of its groups. Each copy serves other query heads, its gradient is that part
only, and nobody sums over the copies.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from isograd_verify.corpus.attention import HEADS, SIZE, attend, heads
from isograd_verify.corpus.plain import HIDDEN, VOCAB, batch, cross_entropy, cut, seeded, steps, valid
from isograd_verify.corpus.sharded import copied, summed

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", r"^[kv]\."


class Model(nn.Module):
    """Four query heads are cut over the ranks; the one key/value head is on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.k = nn.Linear(HIDDEN, SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, SIZE, bias=False)
        self.o = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def shard(self) -> None:
        self.q, self.o = cut(self.q, 0), cut(self.o, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inside = copied(x)
        q, k, v = (heads(layer(inside)) for layer in (self.q, self.k, self.v))
        logits: Tensor = self.head(x + summed(self.o(attend(q, k, v).flatten(-2))))
        return logits


def train(bug: bool, seed: int) -> None:
    model = seeded(Model, seed)
    model.shard()
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        if not bug:
            dist.all_reduce(model.k.weight.grad)
            dist.all_reduce(model.v.weight.grad)
