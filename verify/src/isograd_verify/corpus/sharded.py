"""Models for the corpus that are cut over tensor-parallel ranks: an MLP as Megatron cuts it, and one that gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB, Copy, Mlp, Sum, cut, gather

INNER = 12


def copied(x: Tensor) -> Tensor:
    return Copy.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor) -> Tensor:
    return Sum.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class ShardedMlp(Mlp):
    """`up` and `down` are cut over the ranks; all else is replicated and sees the same activations everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def shard(self) -> None:
        self.up, self.down = cut(self.up, 0), cut(self.down, 1)

    def block(self, x: Tensor) -> Tensor:
        return x + summed(self.down(F.gelu(self.up(copied(self.norm(x))))))  # inside: [batch, sequence, inner / tp]


def split_gradients(model: ShardedMlp) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of which each rank holds a part, gradients of which each rank holds all)."""
    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        (parts if name.startswith(("up", "down")) else wholes).append(parameter.grad)
    return parts, wholes


class GatherFeatures(torch.autograd.Function):
    """Forward: all-gather the features. Backward: what follows is computed alike on all ranks, so take my slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


class GatheredMlp(nn.Module):
    """`up` is cut over its outputs, which are gathered at once; `norm` and `head` are computed alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.head = nn.Linear(INNER, VOCAB)
        self.gather: Callable[[Tensor], Tensor] = GatherFeatures.apply

    def shard(self) -> None:
        self.up = cut(self.up, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.gather(F.gelu(self.up(copied(self.embed(tokens)))))  # [batch, sequence, inner]
        logits: Tensor = self.head(self.norm(inner))
        return logits
