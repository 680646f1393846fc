"""The dynamic loss scale of fp16. bf16 and fp32 do not need one. (A run's dtype: train/sections.py. fp32 masters of
half precision: engine/zero.py. The dtype of sums of gradients: engine/plan.py.)

Only the decision is here; the engine takes it from the global gradient norm, which is the same number on all ranks, so
no rank skips a step alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Halved at an overflow, doubled after `growth_interval` good steps in a row. Powers of two: scaling is exact.

    The initial value is low because gradients arrive multiplied by their weight (a token count), not as a mean.
    """

    value: float = 2.0**8
    growth_interval: int = 2000
    smallest: float = 2.0**-24
    largest: float = 2.0**24
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Count one step; `overflow` says whether its gradients were not finite."""
        if overflow:
            self._set(max(self.value / 2, self.smallest), 0)
            return
        good = self.good_steps + 1
        self._set(min(self.value * 2, self.largest) if good % self.growth_interval == 0 else self.value, good)

    def _set(self, value: float, good_steps: int) -> None:
        """As a checkpoint has them."""
        self.value, self.good_steps = value, good_steps
