"""Which experts tokens choose in a rehearsal: nobody knows before there is a model and data, so it is stated.

    even    token t chooses the experts t k, t k + 1, ... t k + k - 1, counted around
    zipf    the expert of place i is chosen in proportion to 1 / (i + 1), at most once by a token; on every rank and
            layer in the same order, so the first rank of each ep group is the busiest

Under both, ranks with as many tokens tell each other equal counts.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from isograd.nn.routing import ExpertOptions

LOADS = ("even", "zipf")


@lru_cache(64)
def chosen(load: str, tokens: int, experts: int, per_token: int) -> Tensor:
    """int64 [tokens, per_token]: the experts of each token, which are different ones."""
    slots = torch.arange(tokens * per_token)
    if load == "even":
        return (slots % experts).view(tokens, per_token)
    counts = torch.tensor(_counts(tokens, experts, per_token))
    expert = torch.repeat_interleave(torch.arange(experts), counts)
    return (
        expert.view(per_token, tokens).t().contiguous()
    )  # slots of one expert are neighbours, at most `tokens` of them


def _counts(tokens: int, experts: int, per_token: int) -> list[int]:
    """How often each expert is chosen; whole numbers whose sum is tokens x per_token, none above `tokens`."""
    found, left = [], tokens * per_token
    for place in range(experts):
        weight = sum(1 / (other + 1) for other in range(place, experts))
        found.append(min(tokens, math.ceil(left / (place + 1) / weight - 1e-9)))
        left -= found[-1]
    return found


class StatedRouting:
    """Takes the place of nn/routing.py's `choose`."""

    def __init__(self, load: str) -> None:
        self.load = load

    def __call__(self, scores: Tensor, options: ExpertOptions, bias: Tensor | None = None) -> Tensor:
        """[tokens, per_token], whatever the scores are."""
        return chosen(self.load, len(scores), options.number, options.per_token)


def busiest(load: str, experts: int, per_token: int, ep: int) -> float:
    """What the busiest rank of an ep group computes, over an even share."""
    tokens = 1 << 16
    counts = chosen(load, tokens, experts, per_token).flatten().bincount(minlength=experts)
    return float(counts.view(ep, -1).sum(1).max()) * ep / (tokens * per_token)
