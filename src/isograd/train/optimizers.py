"""From a config's words to a torch optimizer of the engine's shards, and the learning rate of each step."""

from __future__ import annotations

import math

import torch

from isograd.engine.zero import Factory, Shards
from isograd.train.config import Optimizer


def factory(config: Optimizer) -> Factory:
    def make(shards: Shards) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups(shards, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    return make


def groups(shards: Shards, decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms and biases do not. A group that would be empty is left out."""
    kinds: dict[float, list[torch.nn.Parameter]] = {}
    for shard in shards:
        kinds.setdefault(decay if shard.dim() > 1 else 0.0, []).append(shard)
    return [{"params": members, "weight_decay": rate} for rate, members in kinds.items()]


def rate(config: Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step (counted from 0), as a share of `lr`."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    low = config.min_lr / config.lr
    way = (step - config.warmup) / max(1, steps - 1 - config.warmup)
    way = min(1.0, way)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "linear":
        return 1 - (1 - low) * way
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * way))


class Schedule:
    """Sets every group's rate as a function of the step alone, so that there is nothing to save."""

    def __init__(self, config: Optimizer, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.config, self.optimizer, self.steps = config, optimizer, steps
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        share = rate(self.config, step, self.steps)
        for group, base in zip(self.optimizer.param_groups, self._bases, strict=True):
            group["lr"] = base * share
        return self.config.lr * share
