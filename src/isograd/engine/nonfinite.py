"""Which ranks and parameters had numbers that are not finite, when a step was skipped.

A NaN in one rank's loss reaches every gradient of that rank. A NaN that is born in backward leaves all losses finite:
the parameters upstream of it have NaN gradients, on the rank where it was born. After the reduction every rank has
them, and a rank's own gradients are gone. So the owner of rows looks at their sum as it lands, in which a NaN or an Inf
stays visible, and then at what each has sent (`Reducer.not_finite`). Where looking would make a GPU wait, each rank
keeps the sum of all its gradients on the device. Only a skipped step gathers names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm.consensus import all_gather_object
from isograd.engine.step import StepState

_NAMES = 64  # that a rank tells the others


@dataclass(frozen=True)
class NonFiniteReport:
    """Equal on all ranks."""

    ranks: tuple[int, ...]  # whose own loss was not finite
    born: tuple[int, ...]  # whose own gradients were not finite, before they were summed over ranks
    parameters: tuple[str, ...]  # whose reduced gradient was not finite; of many, the first ones of each rank

    def __str__(self) -> str:
        if self.ranks:
            who = f"the loss of {_ranks(self.ranks)}"
        elif self.born:
            who = f"every loss was finite; the backward of {_ranks(self.born)} was not"
        else:
            who = "every loss was finite, and so were each rank's gradients until they were summed"
        shown = ", ".join(self.parameters[:6]) + (f" and {len(self.parameters) - 6} more" * (len(self.parameters) > 6))
        return f"{who}; gradients of {shown or 'no parameter (their norm overflowed)'}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@torch.no_grad()
def find_nonfinite(step_state: StepState, losses: Tensor) -> NonFiniteReport:
    """losses: one per rank of the world. Reduced gradients are looked at on the ranks that own their rows, before they
    are cleared."""
    final_shards = step_state.now.final_shards
    mine = [slot.name for slot, rows in final_shards.items() if not bool(torch.isfinite(rows).all())]
    nonfinite_ranks = step_state.reducer.not_finite(final_shards)
    told = all_gather_object([sorted(nonfinite_ranks), mine[:_NAMES]], step_state.mesh)
    names = dict.fromkeys(name for _, names in told for name in names)
    ranks = tuple(rank for rank, loss in enumerate(losses.tolist()) if not math.isfinite(loss))
    return NonFiniteReport(ranks, tuple(sorted({rank for seen, _ in told for rank in seen})), tuple(names))
