"""Which token comes next. A draw is a function of the seed, the number of the sample and the place in it, and of the
logits: the same on every rank, and the same whatever else is written beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.core import rng
from isograd.core.rng import Key


@dataclass(frozen=True)
class Sampling:
    """The words of transformers' GenerationConfig; the defaults are those of the command line."""

    max_new_tokens: int = 256
    temperature: float = 0.8  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0


def draw(logits: Tensor, key: Key, place: int, how: Sampling) -> int:
    """One token of [vocab] logits."""
    if how.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = logits.double().div(how.temperature).sort(descending=True, stable=True)
    if how.top_k:
        ordered = ordered[: how.top_k]
    weights = torch.softmax(ordered, -1)
    sums = weights.cumsum(-1)
    if how.top_p < 1:
        sums = sums[: int((sums - weights < how.top_p).sum())]
    point = rng.uniform(key, torch.tensor([place], device=logits.device)).double() * sums[-1]
    return int(tokens[int(torch.searchsorted(sums, point).clamp(max=len(sums) - 1))])
