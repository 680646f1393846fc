"""Whose numbers were not finite, when a step was skipped: the ranks by their losses, the parameters by their gradients.

Asked for only then, so that it may gather names. A NaN in one rank's loss reaches every gradient; one that is born in
backward leaves all losses finite, and the parameters upstream of it tell where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm.notes import gather_notes
from isograd.engine.plan import Plan
from isograd.mesh import Mesh

_NAMES = 64  # that a rank tells the others


@dataclass(frozen=True)
class Blame:
    """Equal on all ranks."""

    ranks: tuple[int, ...]  # whose own loss was not finite
    parameters: tuple[str, ...]  # whose settled gradient was not; of many, the first ones of each rank

    def __str__(self) -> str:
        losses = f"the loss of rank {', '.join(map(str, self.ranks))}" if self.ranks else "every loss was finite"
        shown = ", ".join(self.parameters[:6]) + (f" and {len(self.parameters) - 6} more" * (len(self.parameters) > 6))
        return f"{losses}; gradients of {shown or 'no parameter (their norm overflowed)'}"


@torch.no_grad()
def blame(plan: Plan, losses: Tensor, mesh: Mesh) -> Blame:
    """`losses`: one per rank of the world. Gradients are looked at where they are settled, before they are cleared."""
    mine = [slot.name for slot in plan.slots if slot.paid is not None and not bool(torch.isfinite(slot.paid).all())]
    told = gather_notes(mine[:_NAMES], mesh.group("world"), mesh.device)
    names = dict.fromkeys(name for names in told for name in names)
    return Blame(tuple(rank for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss)), tuple(names))
