"""From a config's words to a torch optimizer of the engine's shards, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from isograd.engine import ChainedOptimizer, Muon, Shards
from isograd.engine.zero import Factory
from isograd.errors import TrainError
from isograd.train.sections import Optimizer

# Which matrices these optimizers step whole, each on one rank; the rest goes to AdamW. Muon is not for embeddings.
MATRICES = {"muon": ("blocks.*",), "adafactor": ("*",), "adamw_8bit": ("*",)}
ELEMENTWISE = ("lion", "schedule_free")  # of other packages than torch
PACKAGES = {"lion": "lion-pytorch", "schedule_free": "schedulefree", "adamw_8bit": "bitsandbytes"}
PROGRESS = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")  # what schedule-free counts in its groups


def class_of(name: str) -> Any:
    """The optimizer's class; TrainError if its package is not installed."""
    try:
        if name == "lion":
            from lion_pytorch import Lion

            return Lion
        if name == "schedule_free":
            from schedulefree import AdamWScheduleFree

            return AdamWScheduleFree
        if name == "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit
    except ImportError as error:
        package = PACKAGES[name]
        raise TrainError(
            "IG982", f"the config asks for optimizer.name {name}, and the package is not installed", seen=str(error),
            expected=f"the package {package}", fix=f"pip install {package}, or another optimizer.name",
        ) from error  # fmt: skip
    return {"adamw": torch.optim.AdamW, "muon": Muon, "adafactor": torch.optim.Adafactor}[name]


def factory(config: Optimizer) -> Factory:
    """What the Engine calls with its shards to make the optimizer of a config."""
    kind, decay = class_of(config.name), config.weight_decay

    def adamw(shards: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(shards, decay), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def by_matrix(shards: Shards) -> torch.optim.Optimizer:
        rate = config.muon_lr if config.name == "muon" and config.muon_lr else config.lr
        more = {"betas": config.betas, "eps": config.eps} if config.name == "adamw_8bit" else {}
        return ChainedOptimizer(kind(shards.matrices, lr=rate, weight_decay=decay, **more), adamw(shards.rest))

    def by_element(shards: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        more = {"eps": config.eps} if config.name == "schedule_free" else {}
        made: torch.optim.Optimizer = kind(groups(shards, decay), lr=config.lr, betas=config.betas, **more)
        return made

    return by_matrix if config.name in MATRICES else by_element if config.name in ELEMENTWISE else adamw


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
