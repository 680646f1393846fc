"""Which experts tokens choose in a rehearsal: nobody knows before there is a model and data, so they choose evenly."""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.nn.routing import ExpertOptions


def evenly(scores: Tensor, options: ExpertOptions, bias: Tensor | None = None) -> Tensor:
    """[tokens, per_token], whatever the scores are: token t chooses the experts t k, t k + 1, ... t k + k - 1, counted
    around. Takes the place of nn/routing.py's `choose`; ranks with as many tokens tell each other equal counts."""
    slots = torch.arange(len(scores) * options.per_token)
    return (slots % options.number).view(len(scores), options.per_token)
