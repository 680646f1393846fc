"""Learning from a teacher's distribution instead of a label: one loss for each token."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def distil(
    logits: Tensor, teacher: Tensor, kind: Literal["forward", "reverse", "between"] = "forward",
    *, temperature: float = 1.0, mix: float = 0.5,
) -> Tensor:  # fmt: skip
    """logits, teacher [..., vocab], at one temperature; times its square, so that gradients keep their size.

    forward: KL(teacher || student); reverse: KL(student || teacher); between: the mean of the KLs of the teacher
    (weight `mix`) and of the student to their mixture (generalised Jensen-Shannon).
    """
    mine, theirs = (t / temperature for t in (logits, teacher.detach()))
    mine, theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
    if kind == "between":
        both = torch.logaddexp(theirs + math.log(mix), mine + math.log(1 - mix))
        found = mix * _kl(theirs, both) + (1 - mix) * _kl(mine, both)
    else:
        found = _kl(theirs, mine) if kind == "forward" else _kl(mine, theirs)
    return found * temperature**2


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log probabilities; what has no probability under p adds nothing."""
    return torch.where(p == -torch.inf, torch.zeros_like(p), p.exp() * (p - q)).sum(-1)
