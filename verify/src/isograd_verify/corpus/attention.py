"""Attention for the corpus: causal and small, cut over heads by the caller, or by the two exchanges of Ulysses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB

HEADS, SIZE = 4, 4


def heads(x: Tensor) -> Tensor:
    y: Tensor = x.unflatten(-1, (-1, SIZE))  # [batch, sequence, heads, size]
    return y


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, sequence, heads, size] each; a single key/value head serves all query heads."""
    q, k, v = (x.expand_as(q).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# -- Ulysses: sequence shards outside of attention, head shards inside -----------------------------------------------


class AllToAll(torch.autograd.Function):
    """x[r] goes to rank r; result[r] came from rank r. Backward is the same exchange: it is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


def exchange(x: Tensor) -> Tensor:
    return AllToAll.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class ToHeads(nn.Module):
    """My part of the sequence with all heads -> the whole sequence with my heads."""

    def forward(self, x: Tensor) -> Tensor:
        to = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)  # [rank, batch, part, heads / cp, size]
        return exchange(to).movedim(0, 1).flatten(1, 2)  # [batch, sequence, heads / cp, size]


class ToSequence(nn.Module):
    """The whole sequence with my heads -> my part of the sequence with all heads."""

    def forward(self, x: Tensor) -> Tensor:
        to = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)  # [rank, batch, part, heads / cp, size]
        return self.merge(exchange(to))

    def merge(self, received: Tensor) -> Tensor:
        return received.movedim(0, 2).flatten(2, 3)  # [batch, part, heads, size]


class UlyssesModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.k = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
        self.to_heads, self.to_sequence = ToHeads(), ToSequence()
        self.o = nn.Linear(HEADS * SIZE, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [batch, part of the sequence, hidden]
        q, k, v = (self.to_heads(heads(layer(x))) for layer in (self.q, self.k, self.v))
        logits: Tensor = self.head(x + self.o(self.to_sequence(attend(q, k, v)).flatten(-2)))
        return logits
