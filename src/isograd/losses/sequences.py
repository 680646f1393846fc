"""One number for each sequence out of numbers for its tokens, also where cp ranks hold parts of a sequence.

`sequence_sums` adds up over the cp group, forward and backward: every rank of the group has the whole sum and computes
the same loss from it. So each rank stands for 1/cp of the sequences, which is the weight of `mean_of_sequences`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.mesh import Mesh


def sequence_sums(values: Tensor, mask: Tensor, sequences: Tensor, number: int, mesh: Mesh | None = None) -> Tensor:
    """[number]: the sum over the tokens of each sequence that the mask keeps.

    values, mask, sequences [b, s]: of the tokens that are here; sequences as of `share.numbered`, before rows were cut.
    Under cp all ranks of a group call it, with the same number.
    """
    kept = torch.where(mask.bool() & (sequences >= 0), values, torch.zeros_like(values)).reshape(-1)
    sums = values.new_zeros(number).index_add(0, sequences.clamp(min=0).reshape(-1), kept)
    if mesh is None:
        return sums
    group = mesh.group("cp")
    return ops.copy_in(ops.all_reduce(sums, group), group)


def sequence_means(values: Tensor, mask: Tensor, sequences: Tensor, number: int, mesh: Mesh | None = None) -> Tensor:
    """[number]: the mean instead; 0 over nothing."""
    ones = torch.ones_like(values).detach()
    counts = sequence_sums(ones, mask, sequences, number, mesh)
    return sequence_sums(values, mask, sequences, number, mesh) / counts.clamp(min=1)


def mean_of_sequences(losses: Tensor, mesh: Mesh | None = None) -> tuple[Tensor, float]:
    """(mean, weight) of one loss for each sequence or pair: a term. Under cp, of losses that its ranks all have."""
    ranks = 1 if mesh is None else mesh.size("cp")
    return losses.sum() / max(1, len(losses)), len(losses) / ranks
