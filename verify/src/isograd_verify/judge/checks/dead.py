"""Check of life: gradients that are all zero are equal under every layout, and prove nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import Loss
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding


def alive(analysis: Analysis) -> Iterator[Finding]:
    """Some matrix of the model has a gradient that is not zero, in some watched step."""
    ranks, steps = analysis.recording.ranks, analysis.recording.steps
    if analysis.step != steps[0]:
        return
    names = tuple(n for n in analysis.names if analysis.info(n).trainable and len(analysis.info(n).whole) > 1)
    sums = [r.group(step, "sum") for r in ranks for step in steps]
    losses = [loss for record in ranks for loss in record.of(Loss, analysis.step)]
    without_labels = bool(losses) and not any(loss.count for loss in losses)
    if not names or without_labels or any(name not in analysis.sums[analysis.holders(name)[0]] for name in names):
        return
    if any(bool(one[name].any()) for one in sums for name in names if name in one):
        return
    sentence = f"the gradients of all {len(names)} matrices are zero in {len(steps)} watched steps"
    chance = [loss for loss in losses if loss.classes > 1 and _by_chance(loss)]
    if chance:
        sentence += f", and the loss is {chance[0].value:.4f}, the logarithm of its {chance[0].classes} classes: "
        sentence += "the model gives every class the same probability and learns nothing"
    else:
        sentence += ": nothing can be learnt from them, and runs that are compared would be equal"
    yield Finding(BUG if chance else INCONCLUSIVE, "dead-model", sentence, tensors=names)


def _by_chance(loss: Loss) -> bool:
    expected = math.log(loss.classes)
    return abs(loss.value - expected) <= tolerances.CHANCE * expected
