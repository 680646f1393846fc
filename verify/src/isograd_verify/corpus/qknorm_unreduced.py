"""qknorm-unreduced: one weight normalises the queries (keys) of all heads, but each rank knows its own heads only.

Met wherever q/k norms were added to a tensor-parallel model: without sequence parallelism "norms need no reduction",
except for these two. Each rank's copy follows its own heads.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from isograd_verify.corpus.attention import HEADS, SIZE, attend, heads
from isograd_verify.corpus.plain import HIDDEN, VOCAB, batch, cross_entropy, cut, seeded, steps, valid
from isograd_verify.corpus.sharded import copied, summed

WORLD, LAYOUT = 2, "tp2"
AXIS, TENSORS = "tp", r"^[qk]_norm\."


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.k = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.o = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def shard(self) -> None:
        self.q, self.k, self.v, self.o = cut(self.q, 0), cut(self.k, 0), cut(self.v, 0), cut(self.o, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inside = copied(x)
        q, k, v = (heads(layer(inside)) for layer in (self.q, self.k, self.v))  # [batch, sequence, heads / tp, size]
        mixed = attend(self.q_norm(q), self.k_norm(k), v).flatten(-2)
        logits: Tensor = self.head(x + summed(self.o(mixed)))
        return logits


def train(bug: bool, seed: int) -> None:
    model = seeded(Model, seed)
    model.shard()
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        if not bug:
            dist.all_reduce(model.q_norm.weight.grad)
            dist.all_reduce(model.k_norm.weight.grad)
