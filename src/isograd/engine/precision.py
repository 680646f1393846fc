"""The dynamic loss scale of fp16. bf16 and fp32 do not need one. (A run's dtype: train/sections.py. fp32 masters of
half precision: engine/zero.py. The dtype of sums of gradients: engine/plan.py.)

Only the decision is here; the engine takes it from the global gradient norm, which is the same number on all ranks, so
no rank skips a step alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """Halved at an overflow, doubled after `growth_interval` good steps in a row. Powers of two: scaling is exact.

    The initial value is low because gradients arrive multiplied by their weight (a token count), not as a mean.
    """

    value: float = 2.0**8
    growth_interval: int = 2000
    smallest: float = 2.0**-24
    largest: float = 2.0**24
    good_steps: int = 0

    def after(self, overflow: bool) -> LossScale:
        """That of the next step; `overflow` says whether this one's gradients were not finite."""
        if overflow:
            return replace(self, value=max(self.value / 2, self.smallest), good_steps=0)
        good = self.good_steps + 1
        value = min(self.value * 2, self.largest) if good % self.growth_interval == 0 else self.value
        return replace(self, value=value, good_steps=good)
