"""Learning from a teacher's distribution instead of a label: one loss for each token."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from isograd.losses import given


def distil(
    logits: Tensor, teacher: Tensor, kind: Literal["forward", "reverse", "between"] = "forward",
    *, temperature: float = 1.0, mix: float = 0.5,
) -> Tensor:  # fmt: skip
    """logits, teacher [..., vocab], at one temperature; times its square, so that gradients keep their size.

    forward: KL(teacher || student); reverse: KL(student || teacher); between: the mean of the KLs of the teacher
    (weight `mix`) and of the student to their mixture (generalised Jensen-Shannon).
    """
    given.one_of("kind of distillation", kind, ("forward", "reverse", "between"))
    given.same_shapes(logits=logits, teacher=teacher)
    given.option("temperature", temperature, temperature > 0, "a number above 0")
    given.option("mix", mix, 0 < mix < 1, "a number between 0 and 1")
    scaled = (t.to(torch.promote_types(t.dtype, torch.float32)) / temperature for t in (logits, teacher.detach()))
    mine, theirs = (t.log_softmax(-1) for t in scaled)
    if kind == "between":
        never = (theirs == -torch.inf) & (mine == -torch.inf)  # their derivative here would be NaN
        p, q = (t.masked_fill(never, 0.0) for t in (theirs, mine))
        both = torch.logaddexp(p + math.log(mix), q + math.log(1 - mix)).masked_fill(never, -torch.inf)
        found = mix * _kl(theirs, both) + (1 - mix) * _kl(mine, both)
    else:
        found = _kl(theirs, mine) if kind == "forward" else _kl(mine, theirs)
    return found * temperature**2


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log probabilities; what has no probability under p adds nothing."""
    never = p == -torch.inf
    apart = p.masked_fill(never, 0.0) - q.masked_fill(never, 0.0)
    return (p.exp() * apart).sum(-1)
