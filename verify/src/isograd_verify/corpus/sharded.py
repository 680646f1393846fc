"""Models for the corpus that are cut over tensor-parallel ranks: an MLP as Megatron cuts it, and one that gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB, Copy, Join, Mlp, Sum, cut

INNER = 12


def copied(x: Tensor, group: Any = None) -> Tensor:
    return Copy.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: Any = None) -> Tensor:
    return Sum.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class ShardedMlp(Mlp):
    """`up` and `down` are cut over the ranks; all else is replicated and sees the same activations everywhere."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def shard(self, group: Any = None) -> None:
        self.up, self.down, self.group = cut(self.up, 0, group), cut(self.down, 1, group), group

    def block(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(copied(self.norm(x), self.group)))  # [batch, sequence, inner / tp]
        return x + summed(self.down(inner), self.group)


def split_gradients(model: ShardedMlp) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of which each rank holds a part, gradients of which each rank holds all)."""
    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        (parts if name.startswith(("up", "down")) else wholes).append(parameter.grad)
    return parts, wholes


class GatheredMlp(nn.Module):
    """`up` is cut over its outputs, which are gathered at once; `norm` and `head` are computed alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.head = nn.Linear(INNER, VOCAB)
        self.gather: Callable[[Tensor, int], Tensor] = Join.apply

    def shard(self) -> None:
        self.up = cut(self.up, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.gather(F.gelu(self.up(copied(self.embed(tokens)))), -1)  # [batch, sequence, inner]
        logits: Tensor = self.head(self.norm(inner))
        return logits
