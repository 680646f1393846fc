"""What the contrastive programs share: two towers, a scale, queries with documents and hard negatives, in plain torch.

Each rank holds some rows; candidates are gathered from all ranks, and what comes back to them is summed over all. The
loss is the sum over rows / rows of all ranks, so that gradients are summed, not averaged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import gather, my_rows, scatter_sum

ROWS, FEATURES, SIZE = 6, 5, 4


def triples(seed: int) -> tuple[Tensor, ...]:
    """Queries, documents and hard negatives of the whole step, [ROWS, FEATURES] each."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return tuple(torch.randn(3, ROWS, FEATURES, generator=generator, dtype=torch.float64))


def mine(seed: int) -> list[Tensor]:
    return [my_rows(t, dist.get_rank(), dist.get_world_size()) for t in triples(seed)]


class GatherRows(torch.autograd.Function):
    """Forward: all-gather along dim 0. Backward: reduce-scatter, because every rank's rows look at all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scatter_sum(gradient, 0)


def everyones(x: Tensor) -> Tensor:
    found: Tensor = GatherRows.apply(x)  # type: ignore[no-untyped-call]
    return found


class Scores(nn.Module):
    """Cosines of queries with candidates, times a scale that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def scale(self) -> Tensor:
        return self.logit_scale

    def forward(self, queries: Tensor, candidates: Tensor) -> Tensor:
        return self.scale().exp() * F.normalize(queries, dim=1) @ F.normalize(candidates, dim=1).T


class Towers(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, SIZE))
        self.document = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, SIZE))
        self.scores = Scores()

    def forward(self, queries: Tensor, *others: Tensor) -> Tensor:
        """Logits of my queries over all ranks' documents, then all ranks' hard negatives."""
        candidates = torch.cat([everyones(self.document(x)) for x in others])
        logits: Tensor = self.scores(self.query(queries), candidates)
        return logits


def own_documents(rows: int) -> Tensor:
    """The column of each of my rows' documents, where documents stand in rank order before all negatives."""
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(rows))
    return torch.arange(rows) + int(sum(counts[: dist.get_rank()]))
