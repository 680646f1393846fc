"""What programs with experts share: a small mixture of experts whose routed experts are cut over ranks, plain torch.

Tokens come to the experts by an all-gather over an ep group, with their weights (zero for an expert that a token has
not chosen), and what each rank's experts add goes back by a reduce-scatter. Ranks of an edp group hold copies of the
same experts. Scores are rounded to quarters before the choice, so that ties are as common as in training that begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB, gathered, scattered

EXPERTS, CHOSEN, INNER = 4, 2, 5


@dataclass(frozen=True)
class Seat:
    """This rank among the experts: its ep group has all experts, its edp group has copies of its own."""

    ep: int
    index: int
    group: Any = None  # of the ranks that have all experts together; None: all ranks
    copies: Any = None  # of the ranks that hold the same experts; None: this rank alone


def take_seat(ep: int) -> Seat:
    """Neighbours form an ep group; on one rank all experts are here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = min(ep, world)
    if ep == world:
        return Seat(ep, rank)
    groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, world, ep)]
    copies = [dist.new_group(list(range(first, world, ep))) for first in range(ep)]
    return Seat(ep, rank % ep, groups[rank // ep], copies[rank % ep])


class Experts(nn.Module):
    """The routed experts that a rank holds: rows of dim 0 of `up` and `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5)

    def keep(self, seat: Seat) -> None:
        self.up, self.down = (nn.Parameter(w.detach().chunk(seat.ep)[seat.index].clone()) for w in (self.up, self.down))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        inner = F.gelu(torch.einsum("th,ehi->eti", x, self.up))  # [experts here, tokens, inner]
        return torch.einsum("te,eti,eih->th", weights, inner, self.down)


class Mixture(nn.Module):
    """Router, routed experts, and a shared expert behind a gate of its own."""

    choice_bias: Tensor

    def __init__(self, seat: Seat, experts: Callable[[], Any] = Experts) -> None:
        super().__init__()
        self.seat = seat
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts()
        self.shared_expert = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
        self.shared_gate = nn.Linear(HIDDEN, 1, bias=False)
        self.register_buffer("choice_bias", torch.zeros(EXPERTS))
        self.gather_weights: Callable[[Tensor, int, Any], Tensor] = gathered

    def scores(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1)

    def choose(self, scores: Tensor, first: bool = True) -> Tensor:
        """[tokens, CHOSEN] experts. `first`: of equal ones those of the lower numbers."""
        numbers = torch.arange(EXPERTS, dtype=scores.dtype) * (1e-9 if first else -1e-9)
        ranked = (4 * scores.detach()).round() + self.choice_bias - numbers
        return ranked.topk(CHOSEN, dim=-1).indices

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        return self.compute(x, scores, self.choose(scores))

    def compute(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """What the chosen experts and the shared one make of x, [tokens, HIDDEN]."""
        kept = scores.gather(1, chosen)
        weights = torch.zeros_like(scores).scatter(1, chosen, kept / kept.sum(1, keepdim=True))
        return self.routed(x, weights) + self.shared_gate(x).sigmoid() * self.shared_expert(x)

    def routed(self, x: Tensor, weights: Tensor) -> Tensor:
        group, here = self.seat.group, EXPERTS // self.seat.ep
        everyones, theirs = gathered(x, 0, group), self.gather_weights(weights, 0, group)
        mine = theirs[:, self.seat.index * here :][:, :here]
        return scattered(self.experts(everyones, mine), 0, group)


class Model(nn.Module):
    """Embedding, a norm, the mixture on a residual stream, and a head."""

    def __init__(self, seat: Seat, mixture: Callable[[Seat], Mixture] = Mixture) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = mixture(seat)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.moe.experts.keep(seat)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.moe(self.norm(x).flatten(0, 1)).view_as(x))


def routed(name: str) -> bool:
    """Whether a parameter is cut over ep, by its name."""
    return ".experts." in name
