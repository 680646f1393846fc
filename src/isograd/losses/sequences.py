"""One number for each sequence out of numbers for its tokens, also where cp ranks hold parts of a sequence.

`sequence_sums` adds up over the cp group, forward and backward: every rank of the group has the whole sum and computes
the same loss from it. So each rank stands for 1/cp of the sequences, which is the weight of `mean_of_sequences`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.core.mesh import Mesh
from isograd.losses import given


def sequence_sums(values: Tensor, mask: Tensor, sequences: Tensor, number: int, mesh: Mesh | None = None) -> Tensor:
    """[number]: the sum over the tokens of each sequence that the mask keeps.

    values, mask, sequences [b, s]: of the tokens that are here; sequences as of `share.numbered`, before rows were cut.
    Under cp all ranks of a group call it, with the same number. Added up in float64; at least float32 comes out.
    """
    given.same_shapes(values=values, mask=mask, sequences=sequences)
    if sequences.device.type == "cpu":
        given.mask_of(mask)
        given.numbers_of("sequences", sequences, below=number, least=-1)
    kept = torch.where(mask.bool() & (sequences >= 0), values, torch.zeros_like(values)).double().reshape(-1)
    sums = kept.new_zeros(number).index_add(0, sequences.clamp(min=0).reshape(-1), kept)
    if mesh is not None:
        group = mesh.group("cp")
        sums = ops.copy_in(ops.all_reduce(sums, group), group)
    return sums.to(torch.promote_types(values.dtype, torch.float32))


def sequence_means(values: Tensor, mask: Tensor, sequences: Tensor, number: int, mesh: Mesh | None = None) -> Tensor:
    """[number]: the mean instead; 0 over nothing."""
    ones = torch.ones_like(values).detach()
    counts = sequence_sums(ones, mask, sequences, number, mesh)
    return sequence_sums(values, mask, sequences, number, mesh) / counts.clamp(min=1)


def mean_of_sequences(losses: Tensor, mesh: Mesh | None = None) -> tuple[Tensor, float]:
    """(mean, weight) of one loss for each sequence or pair: a term. Under cp, of losses that its ranks all have."""
    given.option("the shape of losses", tuple(losses.shape), losses.dim() == 1, "one number for each sequence or pair")
    ranks = 1 if mesh is None else mesh.size("cp")
    return losses.sum() / max(1, len(losses)), len(losses) / ranks
