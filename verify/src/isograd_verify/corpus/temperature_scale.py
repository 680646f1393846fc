"""temperature-scale: the loss sums the logit scale's gradient over the ranks itself, and then all gradients are summed.

Inf-CL's ring of similarities ends its backward so; OpenCLIP's accumulation adds the scale's whole gradient once per
chunk. Encoders are right, the loss is right, and the temperature moves W times as fast.
"""

from __future__ import annotations

from torch import Tensor

from isograd_verify.corpus.pairs import ROWS, Scores, Towers, mine, own_documents
from isograd_verify.corpus.plain import Copy, all_reduce_gradients, cross_entropy, seeded, steps

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "dp", "logit_scale"


class SummingScores(Scores):
    """Its scale's gradient is that of all ranks' rows when backward leaves it."""

    def scale(self) -> Tensor:
        summed: Tensor = Copy.apply(self.logit_scale)  # type: ignore[no-untyped-call]
        return summed


def train(bug: bool, seed: int) -> None:
    model = seeded(Towers, seed)
    if bug:
        model.scores = SummingScores().double()
    for step in steps(model):
        rows = mine(seed + step)
        logits = model(*rows)
        (cross_entropy(logits, own_documents(len(logits))) / ROWS).backward()
        all_reduce_gradients(model)
