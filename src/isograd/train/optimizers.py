"""From a config's words to a torch optimizer of the engine's shards, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from isograd.engine import ChainedOptimizer, Muon, Shards
from isograd.engine.zero import Factory
from isograd.train.sections import Optimizer

MATRICES = ("blocks.*",)  # what Muon steps: the matrices of blocks; embeddings, the head, norms and biases go to AdamW


def factory(config: Optimizer) -> Factory:
    """What the Engine calls with its shards to make the optimizer of a config."""

    def adamw(shards: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups(shards, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def muon(shards: Shards) -> torch.optim.Optimizer:
        rate = config.muon_lr or config.lr
        return ChainedOptimizer(Muon(shards.matrices, lr=rate, weight_decay=config.weight_decay), adamw(shards.rest))

    return muon if config.name == "muon" else adamw


def groups(shards: Iterable[nn.Parameter], decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms and biases do not. A group that would be empty is left out."""
    kinds: dict[float, list[nn.Parameter]] = {}
    for shard in shards:
        kinds.setdefault(decay if shard.dim() > 1 else 0.0, []).append(shard)
    return [{"params": members, "weight_decay": rate} for rate, members in kinds.items()]


def rate(config: Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step (counted from 0), as a share of `lr`."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    low = config.min_lr / config.lr
    way = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))  # 1 after the last step: none is wasted
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":  # warmup, stable, decay
        way = min(1.0, max(0.0, 1 - (steps - step) / (config.decay * steps)))
    if config.schedule in ("linear", "wsd"):
        return 1 - (1 - low) * way
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * way))


class LearningRateSchedule:
    """Sets every group's rate as a function of the step alone, so that there is nothing to save."""

    def __init__(self, config: Optimizer, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.config, self.optimizer, self.steps = config, optimizer, steps
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Set every group's rate for a step (counted from 0); returns what `lr` is at that step."""
        share = rate(self.config, step, self.steps)
        for group, base in zip(self.optimizer.param_groups, self._bases, strict=True):
            group["lr"] = base * share
        return self.config.lr * share
