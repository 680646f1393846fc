"""norm-unreduced: under sequence parallelism a norm sees this rank's tokens only, and nobody sums its gradient.

GPT-NeoX #1257, Megatron-LM #1446. Each rank's norm weight follows its own part of the sequence; copies drift apart.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import (
    HIDDEN,
    VOCAB,
    GatherSequence,
    ScatterSum,
    batch,
    cross_entropy,
    cut,
    seeded,
    steps,
    valid,
)  # fmt: skip

WORLD, LAYOUT = 2, "tp2 sp"
AXIS, TENSORS = "tp", r"norm\."


class Model(nn.Module):
    """Tokens are cut along the sequence outside of the two linear layers, which are cut along their features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 12)
        self.down = nn.Linear(12, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def shard(self) -> None:
        self.up, self.down = cut(self.up, 0), cut(self.down, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [batch, sequence / tp, hidden]
        whole = GatherSequence.apply(self.norm(x))  # type: ignore[no-untyped-call]  # [batch, sequence, hidden]
        mine = ScatterSum.apply(self.down(F.gelu(self.up(whole))))  # type: ignore[no-untyped-call]
        logits: Tensor = self.head(x + mine)
        return logits


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Model, seed)
    model.shard()
    for step in steps(model):
        tokens, labels = batch(seed + step)
        mine = slice(rank * tokens.shape[1] // world, (rank + 1) * tokens.shape[1] // world)
        loss = cross_entropy(model(tokens[:, mine]), labels[:, mine]) / valid(labels)
        loss.backward()
        for name, parameter in model.named_parameters():
            cut_over_ranks = name.startswith(("up", "down"))
            if not cut_over_ranks and not (bug and name.startswith("norm")):
                dist.all_reduce(parameter.grad)
