"""DeepSpeed's schedules with a warmup, step for step as DeepSpeed 0.19 has them.

The first optimizer step is at the least rate, and so is the second one: a schedule's own count begins behind the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class Warmup:
    """Sets a rate before each step: `rate(step, highest)`, where -1 is the first step's number.

    As DeepSpeed's objects: `step` after each optimizer step, `get_lr`, `get_last_lr`, `state_dict`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int, float], float],
        highest: float | list[float] | None = None,
    ) -> None:
        """highest: one for all groups, or one for each; None: the groups' own."""
        self.optimizer, self._rate = optimizer, rate
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.highest = own if highest is None else highest if isinstance(highest, list) else [highest] * len(own)
        self._set(-1)

    def get_lr(self) -> list[float]:
        """The rate of each group."""
        return [self._rate(self.last_batch_iteration, high) for high in self.highest]

    get_last_lr = get_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """After an optimizer step."""
        self._set(self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration)

    def _set(self, number: int) -> None:
        self.last_batch_iteration = number
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's, which is JSON."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of `state_dict`; the groups get the rate at once."""
        self._set(state["last_batch_iteration"])


def rise(step: int, warmup: int, kind: str) -> float:
    """The share of the highest rate in a warmup."""
    if step < 0:
        return 0.0
    warmup = max(2, warmup)
    return math.log(step + 1) / math.log(warmup) if kind == "log" else step / warmup


def to_constant(warmup: int, kind: str, low: float) -> Callable[[int, float], float]:
    """WarmupLR: from low to the highest rate, which stays."""
    return lambda step, high: low + (high - low) * (rise(step, warmup, kind) if step < max(2, warmup) else 1.0)


def to_zero(warmup: int, kind: str, low: float, steps: int) -> Callable[[int, float], float]:
    """WarmupDecayLR: then down in a straight line, to low at the end."""
    first = max(2, warmup)

    def share(step: int) -> float:
        return rise(step, warmup, kind) if step < first else max(0.0, (steps - step) / max(1, steps - first))

    return lambda step, high: low + (high - low) * share(step)


def to_cosine(warmup: int, kind: str, low: float, steps: int, end: float) -> Callable[[int, float], float]:
    """WarmupCosineLR: low and end are shares of the highest rate."""
    first = max(2, warmup)

    def share(step: int) -> float:
        if step < 0:
            return 0.0
        if step < first:
            return low + (1 - low) * rise(step, warmup, kind)
        done = min(1.0, (step - first + 1) / max(1, steps - first))
        return max(0.0, end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)

    return lambda step, high: high * share(step)
