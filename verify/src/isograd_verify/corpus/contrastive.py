"""Bugs of contrastive losses over the rows of all ranks (pairs.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus import plain

ROWS, FEATURES, SIZE = 6, 5, 4


def mine(seed: int) -> list[Tensor]:
    """This rank's queries, documents and hard negatives, [rows, FEATURES] each; the whole step has ROWS."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return [plain.my_part(t) for t in torch.randn(3, ROWS, FEATURES, generator=generator, dtype=torch.float64)]


class Scores(nn.Module):
    """Cosines of queries with candidates, times a scale that is learned."""

    sums_scale = False  # its gradient is that of all ranks' rows when backward leaves it

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, queries: Tensor, candidates: Tensor) -> Tensor:
        scale = plain.copied(self.logit_scale) if self.sums_scale else self.logit_scale
        return scale.exp() * F.normalize(queries, dim=1) @ F.normalize(candidates, dim=1).T


class Towers(nn.Module):
    interleaved = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, SIZE))
        self.document = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, SIZE))
        self.scores = Scores()

    def forward(self, queries: Tensor, *others: Tensor) -> Tensor:
        """Logits of my queries over all ranks' documents, then all ranks' hard negatives."""
        vectors = [self.document(x) for x in others]
        if self.interleaved:
            candidates = plain.gathered(torch.cat(vectors), 0)
        else:
            candidates = torch.cat([plain.gathered(x, 0) for x in vectors])
        return self.scores(self.query(queries), candidates)


def own_documents(rows: int) -> Tensor:
    """The column of each of my rows' documents, where documents stand in rank order before all negatives."""
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(rows))
    return torch.arange(rows) + int(sum(counts[: dist.get_rank()]))


@plain.program("dp2", "dp", r"logit_scale")
def temperature_scale(bug: bool, seed: int) -> None:
    """The loss sums the logit scale's gradient over the ranks itself, and then all gradients are summed."""
    model = plain.seeded(Towers, seed)
    model.scores.sums_scale = bug
    for step in plain.steps(model):
        rows = mine(seed + step)
        logits = model(*rows)
        (plain.cross_entropy(logits, own_documents(len(logits))) / ROWS).backward()
        plain.all_reduce_gradients(model)


def chunks(model: Towers, seed: int, step: int) -> Iterator[tuple[nn.Module, Tensor, int]]:
    """(encoder, one row, the seed of its draws): the same draws on whichever rank the row is."""
    first = ROWS * dist.get_rank() // dist.get_world_size()
    for tower, rows in enumerate(mine(seed + step)):
        for number, row in enumerate(rows.split(1)):
            yield model.query if tower == 0 else model.document, row, 1000 * step + 100 * tower + first + number


@plain.program("dp2", "", "")
def cache_rng(bug: bool, seed: int) -> None:
    """Representations are cached without a graph, and the replay with one drops other elements."""
    model = plain.seeded(Towers, seed, 0.3)
    for step in plain.steps(model):
        cached = []
        for encode, row, draws in chunks(model, seed, step):
            torch.manual_seed(draws)
            with torch.no_grad():
                cached.append(encode(row).requires_grad_())
        queries, *others = (torch.cat(part) for part in zip(*[iter(cached)] * (len(cached) // 3), strict=True))
        logits = model.scores(queries, torch.cat([plain.gathered(vectors, 0) for vectors in others]))
        (plain.cross_entropy(logits, own_documents(len(logits))) / ROWS).backward()
        for (encode, row, draws), vector in zip(chunks(model, seed, step), cached, strict=True):
            if not bug:
                torch.manual_seed(draws)
            encode(row).backward(vector.grad)
        plain.all_reduce_gradients(model)


@plain.program("dp2", "dp", "")
def loss_labels_shifted(bug: bool, seed: int) -> None:
    """Each rank's documents and hard negatives are gathered together, labels count documents alone."""
    model = plain.seeded(Towers, seed)
    model.interleaved = bug
    for step in plain.steps(model):
        logits = model(*mine(seed + step))
        (plain.cross_entropy(logits, own_documents(len(logits))) / ROWS).backward()
        plain.all_reduce_gradients(model)
