"""The one task that all contestants train: sizes, batches, and who takes which rows.

A batch is a function of its number alone. The even one has a label at every position; in the uneven one later rows, and
so later data ranks, have fewer labels, as packed or padded text has: the gradient of the mean over all labels is then
no longer the mean of the ranks' means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE = -100
LR = 3e-4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """About 20 million parameters, 78 MiB in fp32: large enough that the wire counts, small enough for a laptop."""

    vocab: int = 8192
    hidden: int = 384
    layers: int = 8
    heads: int = 6
    mlp: int = 1024
    seq: int = 256
    batch: int = 8  # sequences per step, over all ranks
    micro_batches: int = 8  # of a pipeline, per step

    def parameters(self) -> int:
        per_layer = 4 * self.hidden**2 + 3 * self.hidden * self.mlp + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * per_layer + self.hidden

    def tiny(self) -> Sizes:
        """The same shape in miniature: to load whatever a contestant imports late, before memory is measured."""
        return replace(self, vocab=64, hidden=8 * self.heads, mlp=8 * self.heads, seq=8)

    def for_ranks(self, ranks: int) -> Sizes:
        """Tensor parallelism deals heads out evenly: the fewest heads, from these on, that `ranks` divides."""
        fits = (h for h in range(self.heads, self.hidden + 1) if h % ranks == 0 and self.hidden % (2 * h) == 0)
        return replace(self, heads=next(fits))


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [batch, seq]
    labels: Tensor

    def share(self, index: int, parts: int) -> Batch:
        rows = len(self.tokens) // parts
        return Batch(self.tokens[index * rows : (index + 1) * rows], self.labels[index * rows : (index + 1) * rows])

    @property
    def count(self) -> int:
        return int((self.labels != IGNORE).sum())


def batch(sizes: Sizes, number: int, *, uneven: bool = False) -> Batch:
    source = torch.Generator().manual_seed(number)
    text = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), generator=source)
    labels = text[:, 1:].clone()
    if uneven:
        for row in range(sizes.batch):
            unlabelled = row * sizes.seq * 7 // 8 // (sizes.batch - 1) if sizes.batch > 1 else sizes.seq * 3 // 8
            labels[row, :unlabelled] = IGNORE
    return Batch(text[:, :-1].clone(), labels)
