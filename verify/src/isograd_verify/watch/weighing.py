"""One optional line for a program whose loss the verifier cannot count: a fused kernel, a loss in chunks, weights.

loss = isograd_verify.weigh(fused_cross_entropy(...), n=(labels != -100).sum())
"""

from __future__ import annotations

import sys

from torch import Tensor


def weigh(loss: Tensor, n: Tensor | float, reduction: str = "mean") -> Tensor:
    """Tells the verifier, if one watches, that a loss is the mean (or `reduction="sum"`, the sum) over n labels.

    It returns the loss, unchanged. Call it right after the loss is made, before it is scaled or added to another one.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    life = sys.modules.get("isograd_verify.watch.life")
    for capture in list(life.living) if life is not None else ():
        capture.guarded(capture.labels.weighed, "labels")(loss, n, reduction)
    return loss
