"""cache-rng: representations are cached without a graph, and the replay with one drops other elements.

GradCache, and sentence-transformers #3862: the gradient of a cached representation is handed to another one, because
the state of the random generator was not brought back for the replay. Nothing is missing, everything is a little wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isograd_verify.corpus.pairs import ROWS, Towers, everyones, mine, own_documents, triples
from isograd_verify.corpus.plain import all_reduce_gradients, cross_entropy, seeded, steps

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "", ""  # on each rank by itself; the modules that drew are named


def chunks(model: Towers, seed: int, step: int) -> Iterator[tuple[nn.Module, Tensor, int]]:
    """(encoder, one row, the seed of its draws): the same draws on whichever rank the row is."""
    first = len(triples(0)[0]) * dist.get_rank() // dist.get_world_size()
    for tower, rows in enumerate(mine(seed + step)):
        for number, row in enumerate(rows.split(1)):
            yield model.query if tower == 0 else model.document, row, 1000 * step + 100 * tower + first + number


def train(bug: bool, seed: int) -> None:
    model = seeded(Towers, seed, 0.3)
    for step in steps(model):
        cached = []
        for encode, row, draws in chunks(model, seed, step):
            torch.manual_seed(draws)
            with torch.no_grad():
                cached.append(encode(row).requires_grad_())
        queries, *others = (torch.cat(part) for part in zip(*[iter(cached)] * (len(cached) // 3), strict=True))
        logits = model.scores(queries, torch.cat([everyones(vectors) for vectors in others]))
        (cross_entropy(logits, own_documents(len(logits))) / ROWS).backward()
        for (encode, row, draws), vector in zip(chunks(model, seed, step), cached, strict=True):
            if not bug:
                torch.manual_seed(draws)
            encode(row).backward(vector.grad)
        all_reduce_gradients(model)
