"""loss-labels-shifted: each rank's documents and hard negatives are gathered together, labels count documents alone.

sentence-transformers #3453: candidates come as documents and negatives of rank 0, then those of rank 1; the label of a
row is still its number among all documents. From the second rank on, rows are drawn to other rows' negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd_verify.corpus.pairs import ROWS, Towers, everyones, mine, own_documents
from isograd_verify.corpus.plain import all_reduce_gradients, cross_entropy, seeded, steps

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp", ""  # the loss is another one, and with it all gradients


class Interleaved(Towers):
    def forward(self, queries: Tensor, *others: Tensor) -> Tensor:
        candidates = everyones(torch.cat([self.document(x) for x in others]))
        logits: Tensor = self.scores(self.query(queries), candidates)
        return logits


def train(bug: bool, seed: int) -> None:
    model = seeded(Interleaved if bug else Towers, seed)
    for step in steps(model):
        logits = model(*mine(seed + step))
        (cross_entropy(logits, own_documents(len(logits))) / ROWS).backward()
        all_reduce_gradients(model)
