"""What each contrastive loss is, on one device, in a few lines: the definition, and the oracle of the tests.

Row i's positive is column i. Every function returns one loss per row; a step's loss is their sum / number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def info_nce(logits: Tensor, hidden: Tensor | None = None) -> Tensor:
    """logits [rows, columns]: -log softmax of each row's own column; `hidden` columns are not negatives of a row."""
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def siglip(logits: Tensor, hidden: Tensor | None = None) -> Tensor:
    """-log sigmoid(logit) of the pairs that belong together, -log sigmoid(-logit) of the others, summed per row."""
    sign = 2 * torch.eye(*logits.shape, dtype=logits.dtype) - 1
    losses = F.softplus(-sign * logits)
    return (losses if hidden is None else losses.masked_fill(hidden, 0)).sum(1)


def same_id(rows: Tensor, columns: Tensor) -> Tensor:
    """Hidden: columns of the same id as the row's own, which would be false negatives."""
    return (rows[:, None] == columns[None]).masked_fill(torch.eye(len(rows), len(columns), dtype=torch.bool), False)


def guided(rows: Tensor, columns: Tensor, margin: float = 0.0, relative: bool = False) -> Tensor:
    """Hidden: columns that a guide finds more similar to the row than the row's own column - margin (GISTEmbed)."""
    near = F.normalize(rows, dim=1) @ F.normalize(columns, dim=1).T
    own = near.diagonal()[:, None]
    limit = own * (1 - margin) if relative else own - margin
    return (near > limit).masked_fill(torch.eye(len(rows), len(columns), dtype=torch.bool), False)
