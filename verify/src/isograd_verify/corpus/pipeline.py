"""A model in two pipeline stages for the corpus, with hand-written sends: on one rank it is the whole model.

Ranks are numbered with stages outermost. Tied, the embedding's weight is also the head's: both stages hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB, batch, cross_entropy, micro_batches, seeded, steps, valid

WORLD, LAYOUT = 4, "pp2 dp2"
BUGS = {"accum-undivided": ("micro-batches", ".*"), "clip-per-rank": ("pp", ".*")}
MICRO_BATCHES = 3
CLIP = 0.1  # below every norm here


class Piped(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.last = nn.Linear(HIDDEN, HIDDEN)
        self.tied = tied
        if not tied:
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def keep(self, stage: int) -> None:
        """Of two stages, this one only."""
        lost = ["norm", "last"] if stage == 0 else ["first"]
        if not self.tied:
            lost += ["head"] if stage == 0 else ["embed"]
        for name in lost:
            delattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        """From tokens, or from what the first stage passed on; to logits, or to what it passes on."""
        if hasattr(self, "first"):
            x = self.embed(x)
            x = x + torch.tanh(self.first(x))
        if hasattr(self, "last"):
            x = x + torch.tanh(self.last(self.norm(x)))
            x = F.linear(x, self.embed.weight) if self.tied else self.head(x)
        return x


@dataclass
class Seat:
    """Where this rank stands, and what it trains."""

    stage: int
    stages: int
    data: int
    datas: int
    model: Piped
    data_group: Any
    tie_group: Any

    @property
    def first(self) -> bool:
        return self.stage == 0


def take_seat(seed: int, tied: bool = True) -> Seat:
    rank, world = dist.get_rank(), dist.get_world_size()
    stages = 2 if world > 1 else 1
    datas = world // stages
    stage, data = divmod(rank, datas)
    data_groups = [dist.new_group([s * datas + d for d in range(datas)]) for s in range(stages)]
    tie_groups = [dist.new_group([s * datas + d for s in range(stages)]) for d in range(datas)]
    model = seeded(Piped, seed, tied)
    if stages > 1:
        model.keep(stage)
    return Seat(stage, stages, data, datas, model, data_groups[stage], tie_groups[data])


def sum_gradients(seat: Seat) -> None:
    """Over the data ranks, and of the tied weight over the stages that hold it."""
    for name, parameter in seat.model.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=seat.data_group)
        if name == "embed.weight" and seat.model.tied and seat.stages > 1:
            dist.all_reduce(parameter.grad, group=seat.tie_group)


def backwards(seat: Seat, seed: int, micros: int, first: float = 1.0, last: float = 1.0) -> None:
    """Each micro-batch there and back; `first`, `last`: times what that stage's backward starts from."""
    rank, count = dist.get_rank(), float(valid(batch(seed)[1]))
    for x, labels in micro_batches(seat.data, seat.datas, seed, micros):
        if not seat.first:
            x = torch.empty(*x.shape, HIDDEN, dtype=torch.float64)  # noqa: PLW2901
            dist.recv(x, rank - seat.datas)
            x.requires_grad_()
        y = seat.model(x)
        if seat.stage == seat.stages - 1:
            (cross_entropy(y, labels) * (last / count)).backward()
        else:
            dist.send(y.detach().contiguous(), rank + seat.datas)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + seat.datas)
            y.backward(gradient * first)
        if not seat.first:
            assert x.grad is not None
            dist.send(x.grad, rank - seat.datas)


def train(bug: str, seed: int) -> None:
    seat = take_seat(seed, tied=False)
    for step in steps(seat.model):
        backwards(seat, seed + step, MICRO_BATCHES, last=MICRO_BATCHES if bug == "accum-undivided" else 1.0)
        sum_gradients(seat)
        squares = nn.utils.get_total_norm([p.grad for p in seat.model.parameters() if p.grad is not None]).square()
        if seat.stages > 1 and bug != "clip-per-rank":
            dist.all_reduce(squares, group=seat.tie_group)
        nn.utils.clip_grads_with_norm_(list(seat.model.parameters()), CLIP, squares.sqrt())
